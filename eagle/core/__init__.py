"""Trees, verification and the loop that decodes: what no method, no target and no file format changes."""
