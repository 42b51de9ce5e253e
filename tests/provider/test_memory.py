"""Descriptors that strangers send, and the registry page."""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sidestep.errors import PeerViolation
from sidestep.native import layout
from sidestep.provider import memory
from sidestep.provider.pairing.registry import Registry
from sidestep.switch.offers import ConnectionKey


def unsealed_memfd() -> int:
    fd = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    return fd


def half_sealed_memfd() -> int:
    fd = unsealed_memfd()
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    return fd


def huge_memfd() -> int:
    fd = os.memfd_create("huge", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | os.MFD_HUGETLB)
    os.ftruncate(fd, 1 << 21)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, memory.MUST_SEALS)
    return fd


def pipe_end() -> int:
    reader, writer = os.pipe()
    os.close(writer)
    return reader


def own_file() -> int:
    return os.open(__file__, os.O_RDONLY)


@pytest.mark.parametrize(
    "make", [unsealed_memfd, half_sealed_memfd, huge_memfd, pipe_end, own_file, lambda: os.eventfd(0)]
)
def test_only_sealed_memfds_pass_for_memory(make: Callable[[], int]) -> None:
    fd = make()
    with pytest.raises(PeerViolation):
        memory.sealed_size(fd, "segment")
    os.close(fd)


def test_a_sealed_memfd_tells_its_size() -> None:
    fd = memory.sealed_memfd("test", 12345)
    assert memory.sealed_size(fd, "segment") == 12345
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    os.close(fd)


@pytest.mark.parametrize("make", [unsealed_memfd, pipe_end, own_file])
def test_only_eventfds_pass_for_doorbells(make: Callable[[], int]) -> None:
    fd = make()
    with pytest.raises(PeerViolation):
        memory.check_eventfd(fd, "doorbell")
    os.close(fd)


def test_a_file_of_an_eventfds_name_is_no_doorbell(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "anon_inode:[eventfd]", os.O_CREAT | os.O_RDWR)
    with pytest.raises(PeerViolation):
        memory.check_eventfd(fd, "doorbell")
    os.close(fd)


@pytest.fixture
def registry() -> Iterator[Registry]:
    made = Registry(netns_cookie=77)
    yield made
    made.close()


def word(registry: Registry, bucket: int) -> tuple[int, int]:
    """Count and generation of a bucket, through the descriptor that shims get."""
    (found,) = struct.unpack("=I", os.pread(registry.fd, 4, layout.REGISTRY_BUCKETS_OFFSET + 4 * bucket))
    return found & 0xFF, found >> 8


def test_the_header_tells_who_provides(registry: Registry) -> None:
    header = layout.unpack("registry_header", os.pread(registry.fd, layout.size("registry_header"), 0))
    assert (header["magic"], header["version"]) == (layout.RPC_MAGIC, layout.LAYOUT_VERSION)
    assert (header["provider_pid"], header["netns_cookie"], header["closing"]) == (os.getpid(), 77, 0)
    registry.set_closing()
    header = layout.unpack("registry_header", os.pread(registry.fd, layout.size("registry_header"), 0))
    assert header["closing"] == 1


def test_a_bucket_counts_and_its_generation_grows_with_offers_only(registry: Registry) -> None:
    assert word(registry, 5) == (0, 0)
    registry.handle_added(5)
    registry.handle_added(5)
    assert word(registry, 5) == (2, 2)
    registry.handle_removed(5)
    assert word(registry, 5) == (1, 2)
    assert word(registry, 4) == (0, 0)
    registry.handle_removed(5)
    with pytest.raises(ValueError, match="no offer"):
        registry.handle_removed(5)


def test_the_count_saturates_and_comes_back_exactly(registry: Registry) -> None:
    for _ in range(300):
        registry.handle_added(9)
    assert word(registry, 9) == (255, 300)
    for _ in range(46):
        registry.handle_removed(9)
    assert word(registry, 9)[0] == 254


def test_shims_cannot_write_the_registry(registry: Registry) -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(registry.fd, b"x", 0)
    with pytest.raises(PermissionError):
        mmap.mmap(registry.fd, layout.REGISTRY_SIZE)
    writable = os.open(f"/proc/self/fd/{registry.fd}", os.O_RDWR)  # the seal holds even for one who may open it so
    with pytest.raises(PermissionError):
        os.pwrite(writable, b"x", 0)
    with pytest.raises(PermissionError):
        mmap.mmap(writable, layout.REGISTRY_SIZE)
    os.close(writable)


def test_the_bucket_is_that_of_the_layout(registry: Registry) -> None:
    key = ConnectionKey(1, bytes(16), 80, bytes(15) + b"\1", 5000)
    assert registry.bucket(key) == registry.bucket(key.mirrored())
    assert registry.bucket(key) == layout.bucket_index(registry.secret, key[1], key[2], key[3], key[4])
