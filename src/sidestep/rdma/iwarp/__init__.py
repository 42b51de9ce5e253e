"""iWARP: RDMAP over DDP over MPA over TCP (RFC 5040, 5041, 5044, 6581), as bytes. Sans-IO; no device yet."""
