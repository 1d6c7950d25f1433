"""Parts shared by methods: blocks, growth of trees, the unroll, losses, validation."""
