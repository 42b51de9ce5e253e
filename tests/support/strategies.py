"""Any legal SDP message, for hypothesis."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address

from hypothesis import strategies as st

from sidestep.sdp import wire
from sidestep.sdp.hello import IpAddress, Version

U8 = st.integers(0, 0xFF)
U16 = st.integers(0, 0xFFFF)
U32 = st.integers(0, 0xFFFF_FFFF)
U64 = st.integers(0, 0xFFFF_FFFF_FFFF_FFFF)
NIBBLE = st.integers(0, 0xF)
OFFERED = st.integers(1, 1 << 31)
VA = st.integers(0, (1 << 64) - (1 << 31))  # the longest offer ends where addresses end
REPORTED = st.integers(0, 1 << 31)
VERSIONS = st.builds(Version, NIBBLE, NIBBLE)


@st.composite
def hellos(draw: st.DrawFn) -> wire.Hello:
    ip_version = draw(NIBBLE)
    address: st.SearchStrategy[IpAddress] = st.builds(IPv6Address, st.integers(0, (1 << 128) - 1))
    if ip_version == 4:
        address = st.builds(IPv4Address, U32)
    return wire.Hello(
        max_adverts=draw(U8),
        des_rem_rcv_sz=draw(U32),
        local_rcv_sz=draw(U32),
        local_port=draw(U16),
        src_ip=draw(address),
        dst_ip=draw(address),
        version=draw(VERSIONS),
        ip_version=ip_version,
        cap=draw(NIBBLE),
        ext_max_adverts=draw(U16),
    )


HEADERS: dict[type[wire.Header], st.SearchStrategy[wire.Header]] = {
    wire.Hello: hellos(),
    wire.HelloAck: st.builds(wire.HelloAck, U8, U32, VERSIONS),
    wire.IwarpHello: st.builds(wire.IwarpHello, U16, U32, U32, U16, U16, VERSIONS),
    wire.IwarpHelloAck: st.builds(wire.IwarpHelloAck, U16, U32, U16, U16, VERSIONS),
    wire.DisConn: st.just(wire.DisConn()),
    wire.AbortConn: st.just(wire.AbortConn()),
    wire.SendSm: st.just(wire.SendSm()),
    wire.RdmaWrCompl: st.builds(wire.RdmaWrCompl, REPORTED),
    wire.RdmaRdCompl: st.builds(wire.RdmaRdCompl, REPORTED),
    wire.ModeChange: st.sampled_from(
        [wire.ModeChange(False, mode) for mode in wire.Mode] + [wire.ModeChange(True, wire.Mode.COMBINED)]
    ),
    wire.SrcAvailCancel: st.just(wire.SrcAvailCancel()),
    wire.SinkAvailCancel: st.just(wire.SinkAvailCancel()),
    wire.SinkCancelAck: st.just(wire.SinkCancelAck()),
    wire.ChRcvBuf: st.builds(wire.ChRcvBuf, U32),
    wire.ChRcvBufAck: st.builds(wire.ChRcvBufAck, st.integers(37, 1 << 31)),
    wire.SuspComm: st.builds(wire.SuspComm, st.integers(1, 0xFFFF).map(wire.service_id)),
    wire.SuspCommAck: st.just(wire.SuspCommAck()),
    wire.SinkAvail: st.builds(wire.SinkAvail, OFFERED, U32, VA, U32),
    wire.SrcAvail: st.builds(wire.SrcAvail, OFFERED, U32, VA),
    wire.Data: st.just(wire.Data()),
}


@st.composite
def messages(draw: st.DrawFn) -> tuple[wire.Header, bytes, bytes]:
    """A header, its payload, and the whole message."""
    header = draw(st.one_of(*HEADERS.values()))
    most = 48 if header.PAYLOAD else 0
    if isinstance(header, wire.SrcAvail):
        most = min(most, header.length - 1)
    payload = draw(st.binary(max_size=most))
    head = wire.encode(
        header, flags=draw(U8), bufs=draw(U16), mseq=draw(U32), mseq_ack=draw(U32), payload_len=len(payload)
    )
    return header, payload, head + payload
