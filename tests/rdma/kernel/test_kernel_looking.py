"""What is known of the kernel's devices without opening one: what sysfs says of addresses, and who is taken away."""

from __future__ import annotations

from pathlib import Path

import pytest

from sidestep.rdma.kernel.removal import is_removal
from sidestep.rdma.kernel.sysfs import kernel_devices, why_not_joined

V1, V2 = "IB/RoCE v1", "RoCE v2"
TEN = "0000:0000:0000:0000:0000:ffff:0a00:0001"  # as sysfs writes 10.0.0.1
SIX = "2001:0db8:0000:0000:0000:0000:0000:0001"


def device(root: Path, name: str, *gids: tuple[str, str], **has: str) -> None:
    """A device with one port; the entries of its table, and what is not as usual."""
    port = root / name / "ports" / "1"
    for folder in ("gids", "gid_attrs/types", "gid_attrs/ndevs"):
        (port / folder).mkdir(parents=True)
    (root / name / "node_type").write_text(has.get("node_type", "1: CA") + "\n")
    (port / "state").write_text(has.get("state", "4: ACTIVE") + "\n")
    (port / "link_layer").write_text(has.get("link_layer", "Ethernet") + "\n")
    for index, (gid, kind) in enumerate(gids):
        (port / "gids" / str(index)).write_text(gid + "\n")
        (port / "gid_attrs" / "types" / str(index)).write_text(kind + "\n")
        (port / "gid_attrs" / "ndevs" / str(index)).write_text("eth0\n")


def why(root: Path, address: str = "10.0.0.1") -> str | None:
    return why_not_joined(address, kernel_devices(root))


def test_an_address_that_a_gid_of_roce_v2_has_is_good(tmp_path: Path) -> None:
    device(tmp_path, "mlx5_0", ("fe80:" + "0:" * 6 + "1", V2), (TEN, V1), (TEN, V2), (SIX, V2))
    assert why(tmp_path) is None
    assert why(tmp_path, "2001:db8::1") is None
    assert why(tmp_path, "10.0.0.2") == "no RDMA device of the kernel has a GID for 10.0.0.2"


@pytest.mark.parametrize(
    ("has", "kind", "reason"),
    [
        ({}, V1, "mlx5_0 has 10.0.0.1 for RoCE v1 only"),
        ({"state": "1: DOWN"}, V2, "port 1 of mlx5_0 is DOWN"),
        ({"link_layer": "InfiniBand"}, V1, "mlx5_0 is InfiniBand, whose paths only its subnet manager knows"),
    ],
)
def test_a_port_that_does_not_do_says_why(tmp_path: Path, has: dict[str, str], kind: str, reason: str) -> None:
    device(tmp_path, "mlx5_0", (TEN, kind), **has)
    assert why(tmp_path) == reason


def test_another_device_that_does_is_taken(tmp_path: Path) -> None:
    device(tmp_path, "mlx5_0", (TEN, V2), state="1: DOWN")
    device(tmp_path, "mlx5_1", (TEN, V2))
    assert why(tmp_path) is None


def test_iwarp_is_named_as_what_it_is(tmp_path: Path) -> None:
    device(tmp_path, "siw0", ("5254:0018:0101:0:0:0:0:0", V1), node_type="4: RNIC")
    wanted = (
        "no RDMA device of the kernel has a GID for 10.0.0.1; siw0: iWARP, whose queue pairs are not joined by number"
    )
    assert why(tmp_path) == wanted


def test_a_kernel_without_rdma_says_so(tmp_path: Path) -> None:
    assert why(tmp_path / "infiniband") == "the kernel has no RDMA device"


@pytest.mark.parametrize(
    ("message", "is_one"),
    [
        (b"remove@/devices/virtual/infiniband_verbs/uverbs0\0ACTION=remove\0DEVNAME=infiniband/uverbs0\0", True),
        (b"remove@/devices/pci0000:00/0000:00:02.0/infiniband_verbs/uverbs0\0", True),
        (b"remove@/devices/virtual/infiniband_verbs/uverbs01\0", False),
        (b"add@/devices/virtual/infiniband_verbs/uverbs0\0ACTION=add\0", False),
        (b"remove@/devices/virtual/net/eth1\0", False),
        (b"libudev\0\xfe\xed\xca\xfe", False),
        (b"", False),
    ],
)
def test_the_uevent_of_a_removal(message: bytes, is_one: bool) -> None:
    assert is_removal(message, "uverbs0") is is_one
