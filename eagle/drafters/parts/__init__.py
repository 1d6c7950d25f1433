"""What methods share: blocks, growth of trees, the unroll, objectives, validation."""
