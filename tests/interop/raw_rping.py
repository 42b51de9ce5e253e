"""The two sides of `rping`, by hand.

A round: the client advertises memory in a Send, the server reads it by RDMA and says so in a Send; the client
advertises other memory, the server writes the text that it has read into it and says so. The server's two answers are
as long as an advertisement and mean nothing else; so does rping's own, which carries an advertisement of its own past.
"""

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct
from typing import ClassVar, Self

from raw_iwarp import RawPeer

from sidestep.rdma.iwarp.ddp import RdmapOp, ReadRequest


@dataclass(frozen=True, slots=True)
class Advertisement:
    """Memory that the other side may use."""

    address: int
    stag: int
    length: int

    _LAYOUT: ClassVar[Struct] = Struct(">QII")
    LENGTH: ClassVar[int] = 16

    def encode(self) -> bytes:
        """Its 16 bytes."""
        return self._LAYOUT.pack(self.address, self.stag, self.length)

    @classmethod
    def decode(cls, payload: bytes) -> Self:
        """Read it."""
        assert len(payload) == cls.LENGTH
        return cls(*cls._LAYOUT.unpack(payload))


def ping(peer: RawPeer, text: bytes, source: Advertisement, sink: Advertisement) -> bytes:
    """One round as the client; what the server has written.

    The text ends with its only zero byte: rping writes back as many bytes as C takes it to have, and fails if that is
    more than its memory.
    """
    assert source.length == sink.length == len(text)
    peer.send_message(RdmapOp.SEND, source.encode())
    _, asked = peer.expect(RdmapOp.READ_REQUEST)
    read = ReadRequest.decode(asked)
    assert (read.source_stag, read.source_offset, read.length) == (source.stag, source.address, len(text))
    peer.send_message(RdmapOp.READ_RESPONSE, text, read.sink_stag, read.sink_offset)
    _, done = peer.expect(RdmapOp.SEND)
    assert len(done) == Advertisement.LENGTH
    peer.send_message(RdmapOp.SEND, sink.encode())
    first, written = peer.expect(RdmapOp.WRITE)
    assert (first.stag, first.offset) == (sink.stag, sink.address)
    _, done = peer.expect(RdmapOp.SEND)
    assert len(done) == Advertisement.LENGTH
    return written


def pong(peer: RawPeer, sink_stag: int, sink_address: int) -> bytes:
    """One round as the server: gives the client back what it has read from it, and returns it."""
    _, advertised = peer.expect(RdmapOp.SEND)
    source = Advertisement.decode(advertised)
    text = peer.read_remote(ReadRequest(sink_stag, sink_address, source.length, source.stag, source.address))
    peer.send_message(RdmapOp.SEND, bytes(Advertisement.LENGTH))
    _, advertised = peer.expect(RdmapOp.SEND)
    sink = Advertisement.decode(advertised)
    assert sink.length == len(text)
    peer.send_message(RdmapOp.WRITE, text, sink.stag, sink.address)
    peer.send_message(RdmapOp.SEND, bytes(Advertisement.LENGTH))
    return text
