"""MPA start-up (RFC 5044 7.1, RFC 6581)."""
