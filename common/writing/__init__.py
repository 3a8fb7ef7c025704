"""From images to shards: what is read, how it is dealt, how tars are written."""
