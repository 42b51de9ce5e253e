"""Proofs that a client holds the connection that it names."""
