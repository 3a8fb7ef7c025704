"""A run's folder and what is kept in it, from start to start."""
