"""The Sockets Direct Protocol as a sans-IO core (design §7; docs/wire/sdp.md): no sockets, no clock, no threads."""
