"""Proofs that who names a connection holds it."""
