"""Heads that guess several tokens ahead, each level from one state."""
