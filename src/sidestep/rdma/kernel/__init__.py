"""Devices of the kernel: InfiniBand, RoCE and iWARP adapters, and Linux's rxe and siw, by libibverbs and librdmacm."""
