"""Conversations as people write them, and as templates print them."""
