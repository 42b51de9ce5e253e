"""SDP as an offload protocol of the switch: connections between hosts, carried over RDMA."""
