"""Checkpoints of unknown origin: files, recognition, inspection and conversion."""
