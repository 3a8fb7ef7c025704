"""Where a report goes: the terminal, metrics.jsonl, TensorBoard."""
