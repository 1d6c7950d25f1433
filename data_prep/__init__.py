"""From conversations to stored features."""
