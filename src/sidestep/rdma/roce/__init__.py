"""InfiniBand's reliable connections over RoCE: packets, management datagrams, and a software HCA that speaks them."""
