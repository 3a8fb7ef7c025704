"""What a folder of shards holds, and one sample of it by position."""
