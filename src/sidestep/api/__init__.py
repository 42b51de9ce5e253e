"""The implementation of `protocol="sdp"` in the Python API: SDP and the software RNIC in the program's own process."""
