"""Heads that fill a block of tokens in one forward."""
