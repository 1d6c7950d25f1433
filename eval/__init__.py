"""Measure drafters, compare methods, and show both."""
