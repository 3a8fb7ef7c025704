"""What is wrong with a sample, and what of a shard can be saved."""
