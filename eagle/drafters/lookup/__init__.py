"""Drafters without a network: they look tokens up in texts or in counts."""
