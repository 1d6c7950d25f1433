"""What is learned from: examples, and the target's hidden features of them."""
