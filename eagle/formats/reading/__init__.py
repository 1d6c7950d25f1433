"""Checkpoints of unknown origin, in one pass: files, keys of the config, recognition, and the network's own table."""
