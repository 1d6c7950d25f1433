"""Engines, each a table of what it reads, leaves out and gets wrong."""
