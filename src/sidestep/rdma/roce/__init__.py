"""InfiniBand's reliable connections over RoCE: packets, management datagrams, checksums. Sans-IO; no device yet."""
