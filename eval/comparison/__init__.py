"""Comparisons of arms: planned, trained, decoded and made into tables."""
