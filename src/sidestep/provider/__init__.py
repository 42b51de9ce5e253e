"""The provider: pairs the two ends of a connection. One thread, one socket, no state that outlives it."""
