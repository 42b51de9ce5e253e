"""Processes that carry connections with other hosts for the provider."""
