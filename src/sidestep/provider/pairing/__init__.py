"""Pairs of ends, and the protocols that carry their bytes."""
