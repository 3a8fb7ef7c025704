"""Bytes to pixels: formats, JPEG's savings, which way is up."""
