"""Bits of half precision that no batch, tree or chunk changes, and how near a tie they decide."""
