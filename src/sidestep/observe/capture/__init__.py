"""Captures: writing a conversation as the packets of RoCEv2, and reading SDP out of files of others."""
