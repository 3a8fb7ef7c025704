"""A run's trace: its rows, the audit of them, the pictures of them."""
