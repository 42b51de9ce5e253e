"""The Offload Transport Interface: RDMA as the verbs name it, on any device (docs/internals/devices.md)."""
