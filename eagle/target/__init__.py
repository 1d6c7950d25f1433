"""The frozen model: read at trees, tapped, borrowed from."""
