"""Heads that draft token by token from their own states."""
