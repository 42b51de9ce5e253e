"""Which RDMA device an interface belongs to, by a tree such as sysfs has it."""

from __future__ import annotations

from pathlib import Path

import pytest

from sidestep import limits
from sidestep.cli.policy import device_of


def gid(root: Path, device: str, interface: str, port: int = 1, index: int = 0) -> Path:
    """An entry of a port's GID table that belongs to an interface."""
    table = root / f"class/infiniband/{device}/ports/{port}/gid_attrs/ndevs"
    table.mkdir(parents=True, exist_ok=True)
    (table / str(index)).write_text(f"{interface}\n")
    return table


def test_a_machine_without_such_devices_has_none(tmp_path: Path) -> None:
    assert device_of("eth0", tmp_path) is None
    (tmp_path / "class/net/eth0").mkdir(parents=True)
    assert device_of("eth0", tmp_path) is None


def test_the_gid_tables_name_the_interfaces(tmp_path: Path) -> None:
    gid(tmp_path, "mlx5_0", "eth0")
    gid(tmp_path, "mlx5_0", "eth0.7", index=3)  # a VLAN
    gid(tmp_path, "mlx5_1", "eth1", port=2)
    found = [device_of(name, tmp_path) for name in ("eth0", "eth0.7", "eth1", "eth2", "eth")]
    assert found == ["mlx5_0", "mlx5_0", "mlx5_1", None, None]


def test_an_empty_entry_is_passed_over(tmp_path: Path) -> None:
    table = gid(tmp_path, "mlx5_0", "eth0", index=1)
    (table / "0").mkdir()  # as unreadable as an empty entry, for root too
    assert device_of("eth0", tmp_path) == "mlx5_0"


def test_the_directory_of_the_adapter_is_the_second_source(tmp_path: Path) -> None:
    (tmp_path / "class/net/eth0/device/infiniband/cxgb4_0").mkdir(parents=True)
    assert device_of("eth0", tmp_path) == "cxgb4_0"
    gid(tmp_path, "siw0", "eth0")
    assert device_of("eth0", tmp_path) == "siw0"


@pytest.mark.parametrize("name", ["", ".", "..", "../net/eth0", "eth0/../eth0"])
def test_a_name_that_no_interface_can_have_is_not_looked_for(tmp_path: Path, name: str) -> None:
    (tmp_path / "class/net/eth0/device/infiniband/mlx5_0").mkdir(parents=True)
    (tmp_path / "class/net/device/infiniband/mlx5_0").mkdir(parents=True)
    (tmp_path / "class/device/infiniband/mlx5_0").mkdir(parents=True)
    assert device_of(name, tmp_path) is None


def test_not_more_is_read_than_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SYSFS_ENTRIES_MAX", 4)
    for index in range(50):
        table = gid(tmp_path, "mlx5_0", f"eth{index}", index=index)
    seen = [device_of(f"eth{index}", tmp_path) for index in range(50)]
    assert seen.count("mlx5_0") == 4
    assert len(list(table.iterdir())) == 50
