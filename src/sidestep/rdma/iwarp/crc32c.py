"""CRC32C, readable and slow: the oracle for faster ones, and enough for tests and tools (RFC 3720 B.4)."""

from __future__ import annotations

from typing import Final

_REFLECTED: Final = 0x82F63B78  # of the polynomial 0x1EDC6F41


def _entry(index: int) -> int:
    for _ in range(8):
        index = index >> 1 ^ (_REFLECTED if index & 1 else 0)
    return index


_TABLE: Final = tuple(_entry(index) for index in range(256))


def crc32c(data: bytes | bytearray | memoryview, start: int = 0) -> int:
    """The checksum of the data; `start` is that of what comes before."""
    crc = start ^ 0xFFFF_FFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFF_FFFF
