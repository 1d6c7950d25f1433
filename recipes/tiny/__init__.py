"""A target that is trained in minutes, and the programs that make it."""
