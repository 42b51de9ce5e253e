"""The network as the kernel has it."""
