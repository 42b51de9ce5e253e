"""The Offload Transport Interface: RDMA as the verbs name it, whatever device is beneath (docs/internals/rdma.md)."""
