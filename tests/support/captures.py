"""Makes captures: conversations over RoCE in every container and on every link, and over iWARP."""

from __future__ import annotations

import gzip
import io
import struct
from collections.abc import Iterable, Sequence

from pcap_file import PcapFile, RoceWriter
from sdp_vectors import Vector, between, vectors

from sidestep.errors import SidestepError
from sidestep.observe.capture.decode import Decoder
from sidestep.observe.capture.events import Event, What
from sidestep.rdma.frames import Side
from sidestep.rdma.roce.connection import RecordKind, RoceEnds, RoceRecord

CONNECTING, ACCEPTING = Side.CONNECTING, Side.ACCEPTING
V = vectors()
CONVERSATION = between("V03", "V35")
# What is in no conversation of one connection: sent behind it, so that each message is in one capture.
EXTRAS = [V[name] for name in ("V43", "V44", "V45", "V46")]
SETUP = (
    RoceRecord(0, CONNECTING, RecordKind.REQ, V["V01"].message),
    RoceRecord(0, ACCEPTING, RecordKind.REP, V["V02"].message),
    RoceRecord(0, CONNECTING, RecordKind.RTU),
)
END = (RoceRecord(0, CONNECTING, RecordKind.DREQ), RoceRecord(0, ACCEPTING, RecordKind.DREP))


def side_of(vector: Vector) -> Side:
    """Who sends it."""
    return ACCEPTING if vector.sender == "A" else CONNECTING


def sends(chosen: Iterable[Vector]) -> list[RoceRecord]:
    """The vectors as messages."""
    return [RoceRecord(0, side_of(vector), RecordKind.SEND, vector.message) for vector in chosen]


def timed(records: Iterable[RoceRecord], start_s: float = 1000.0) -> list[RoceRecord]:
    """A record each tenth of a millisecond."""
    return [
        RoceRecord(
            start_s + index / 10_000, one.side, one.kind, one.data, one.rkey, one.va, one.length, one.reason,
            one.solicited, one.invalidate, one.syndrome,
        )
        for index, one in enumerate(records)
    ]  # fmt: skip


def written(records: Iterable[RoceRecord], ends: RoceEnds | None = None) -> bytes:
    """A pcap of them."""
    stream = io.BytesIO()
    writer = RoceWriter(PcapFile(stream), ends)
    for record in timed(records):
        writer.write(record)
    return stream.getvalue()


WHOLE = [*SETUP, *sends([*CONVERSATION, *EXTRAS]), *END]


def frames_of(pcap: bytes) -> list[bytes]:
    """The frames of a pcap of ours."""
    found, offset = [], 24
    while offset < len(pcap):
        size = struct.unpack_from("<I", pcap, offset + 8)[0]
        found.append(pcap[offset + 16 : offset + 16 + size])
        offset += 16 + size
    return found


def decoded(capture: bytes) -> list[Event]:
    """All events; errors are raised."""
    return list(Decoder(io.BytesIO(capture), "test.pcap").events())


def partly(capture: bytes) -> tuple[list[Event], SidestepError | None]:
    """The events before the capture is found damaged, and the error."""
    found = []
    try:
        for event in Decoder(io.BytesIO(capture), "test.pcap").events():
            found.append(event)
    except SidestepError as error:
        return found, error
    return found, None


def messages(events: Iterable[Event]) -> list[bytes]:
    """The SDP messages of a capture."""
    return [event.message for event in events if event.what is What.SDP]


def texts(events: Iterable[Event], what: What) -> list[str]:
    """The lines of one kind."""
    return [event.line() for event in events if event.what is what]


# ---- containers ----


def pcap(
    frames: Sequence[bytes], link: int = 1, *, order: str = "<", magic: int = 0xA1B2C3D4, cut: int = 1 << 18
) -> bytes:
    """A classic pcap; `cut` is the snap length."""
    out = bytearray(struct.pack(order + "IHHiIII", magic, 2, 4, 0, 0, cut, link))
    patched = magic == 0xA1B2CD34
    for index, frame in enumerate(frames):
        kept = frame[:cut]
        out += struct.pack(order + "IIII", 1000, index, len(kept), len(frame)) + bytes(8 * patched) + kept
    return bytes(out)


def block(order: str, kind: int, body: bytes) -> bytes:
    """A block of pcapng."""
    body += bytes(-len(body) % 4)
    size = struct.pack(order + "I", len(body) + 12)
    return struct.pack(order + "I", kind) + size + body + size


def pcapng(frames: Sequence[tuple[int, bytes]], *, order: str = "<", resolution: int = 9, cut: int = 1 << 18) -> bytes:
    """A pcapng of frames with their link types: an interface for each that differs."""
    out = block(order, 0x0A0D0D0A, struct.pack(order + "IHHq", 0x1A2B3C4D, 1, 0, -1))
    links = list(dict.fromkeys(link for link, _ in frames))
    for link in links:
        options = struct.pack(order + "HHB3xHH", 9, 1, resolution, 0, 0)
        out += block(order, 1, struct.pack(order + "HHI", link, 0, cut) + options)
    units = 10**resolution if resolution < 128 else 2 ** (resolution & 0x7F)
    for index, (link, frame) in enumerate(frames):
        stamp = 1000 * units + index * units // 1_000_000
        kept = frame[:cut]
        head = struct.pack(
            order + "IIIII", links.index(link), stamp >> 32, stamp & 0xFFFF_FFFF, len(kept), len(frame)
        )  # fmt: skip
        out += block(order, 6, head + kept + bytes(-len(kept) % 4))
    return out


def simple_pcapng(frames: Sequence[bytes]) -> bytes:
    """With Simple Packet Blocks, which have no time."""
    out = block("<", 0x0A0D0D0A, struct.pack("<IHHq", 0x1A2B3C4D, 1, 0, -1)) + block(
        "<", 1, struct.pack("<HHI", 1, 0, 0)
    )
    return out + b"".join(block("<", 3, struct.pack("<I", len(frame)) + frame) for frame in frames)


def gzipped(capture: bytes) -> bytes:
    """Compressed."""
    return gzip.compress(capture, mtime=0)


# ---- links ----


def with_vlan(frame: bytes) -> bytes:
    """Two VLAN tags."""
    return frame[:12] + b"\x88\xa8\0\5\x81\0\0\7" + frame[12:]


def cooked(frame: bytes) -> bytes:
    """Linux cooked capture, version 1."""
    return struct.pack(">HHH8s", 0, 1, 6, b"\2") + frame[12:]


def cooked_2(frame: bytes) -> bytes:
    """Version 2."""
    return frame[12:14] + struct.pack(">HIHBB8s", 0, 1, 1, 0, 6, b"\2") + frame[14:]


def raw_ip(frame: bytes) -> bytes:
    """No link header."""
    return frame[14:]


def loopback(frame: bytes) -> bytes:
    """BSD's four bytes."""
    return b"\2\0\0\0" + frame[14:]


def transport_of(frame: bytes) -> bytes:
    """From the base transport header to the end, of a frame over IPv4."""
    return frame[14 + 28 :]


def roce_v1(frame: bytes) -> bytes:
    """The same packet behind a global route header."""
    return frame[:12] + b"\x89\x15" + global_route(frame) + transport_of(frame)


def global_route(frame: bytes) -> bytes:
    """A global route header with the frame's addresses."""
    gids = [bytes(10) + b"\xff\xff" + frame[start : start + 4] for start in (26, 30)]
    return struct.pack(">IHBB", 6 << 28, len(transport_of(frame)), 0x1B, 64) + gids[0] + gids[1]


def infiniband(frame: bytes, *, routed: bool = False) -> bytes:
    """The same packet behind a local route header, with a variant checksum at the end."""
    inner = (global_route(frame) if routed else b"") + transport_of(frame)
    lids = [0x100 | frame[offset] for offset in (33, 29)]  # destination, source
    words = (8 + len(inner)) // 4
    return struct.pack(">BBHHH", 0, 3 if routed else 2, lids[0], words, lids[1]) + inner + b"\xaa\xbb"


def erf(frame: bytes, kind: int = 21, *, extensions: int = 0) -> bytes:
    """In Endace's record."""
    inner = infiniband(frame) if kind == 21 else b"\0\0" + frame
    more = b"".join(bytes([0x80 if index < extensions - 1 else 0]) + bytes(7) for index in range(extensions))
    size = 16 + len(more) + len(inner)
    return (
        struct.pack("<Q", 0)
        + struct.pack(">BBHHH", kind | (0x80 if extensions else 0), 4, size, 0, len(inner))
        + more
        + inner
    )


FRAMES_OF_WHOLE = frames_of(written(WHOLE))
