"""Connections with other hosts: the `sdp` protocol, carried over RDMA from provider to provider."""
