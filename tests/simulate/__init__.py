"""Conversations of `sidestep sdp simulate`, with sockets that move, others beside them, and checks at every rest."""
