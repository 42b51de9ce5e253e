"""The Sockets Direct Protocol as a sans-IO core (docs/internals/sdp.md): no sockets, no clock, no threads."""
