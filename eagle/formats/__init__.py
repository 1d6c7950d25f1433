"""Heads on disk: this project's own layout, and those of engines and of other trainers."""
