"""Connections that a provider carries between two ends."""
