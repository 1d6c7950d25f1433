"""Networks of heads: their tensors' names in each spelling, written and read by one table."""
