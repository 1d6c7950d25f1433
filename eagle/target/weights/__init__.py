"""The weights of a target: whether they changed, and in which layout they lie."""
