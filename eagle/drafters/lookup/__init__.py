"""Drafters without a network: they look tokens up in sequences or in counts."""
