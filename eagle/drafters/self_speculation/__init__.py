"""Drafters that are the target itself: some of its layers, a part of its cache, or copies of its weights."""
