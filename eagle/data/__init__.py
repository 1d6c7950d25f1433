"""Training data: examples, and the target's hidden features of them."""
