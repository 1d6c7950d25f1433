"""Draft trees, verification and the decoding loop, independent of drafting method, target and file format."""
