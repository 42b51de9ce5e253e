"""Simulated conversations: see `conversation`."""
