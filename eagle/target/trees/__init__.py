"""How a model reads draft trees: by masks, by rows for what masks cannot steer, or as a whole."""
