"""The parts of `python -m common.benchmark`."""
