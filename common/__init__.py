"""What the three training scripts share."""

__version__ = "0.1.0"
