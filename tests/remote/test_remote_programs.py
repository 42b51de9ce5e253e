"""Real programs on two hosts: promoted, and what they transfer is what was sent."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hosts import Host
from talking import listening, promoted, random_file, sha256_of

pytestmark = pytest.mark.slow

MEBIBYTES = 200


@pytest.fixture
def blob(tmp_path: Path) -> tuple[Path, str]:
    """A file of random bytes, and its checksum."""
    return random_file(tmp_path / "blob", MEBIBYTES)


def test_redis(two: tuple[Host, Host]) -> None:
    one, other = two
    other.popen(["redis-server", "--port", "6379", "--bind", other.address, "--save", "", "--appendonly", "no",
                 "--protected-mode", "no"], stdout=subprocess.DEVNULL)  # fmt: skip
    listening(other, 6379)
    bench = one.popen(
        ["redis-benchmark", "-h", other.address, "-t", "set,get", "-n", "60000", "-c", "20", "-d", "1000", "--csv"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    output, _ = bench.communicate(timeout=120)
    assert bench.returncode == 0
    assert '"GET"' in output
    assert one.joined("connect") >= 20, "not all of its connections were promoted"


def test_nginx_large_file(two: tuple[Host, Host], blob: tuple[Path, str], tmp_path: Path) -> None:
    one, other = two
    path, digest = blob
    config = tmp_path / "nginx.conf"
    config.write_text(
        f"daemon off; master_process off; pid {tmp_path}/pid; error_log stderr;\n"
        f"user root; events {{}}\nhttp {{ access_log off; sendfile on;\n"
        f"server {{ listen {other.address}:8080; root {path.parent}; }} }}\n"
    )
    other.popen(["nginx", "-c", str(config), "-p", str(tmp_path)], stderr=subprocess.DEVNULL)
    listening(other, 8080)
    got = tmp_path / "got"
    client = one.popen(
        ["curl", "-sS", "--limit-rate", "60M", "-o", str(got), f"http://{other.address}:8080/{path.name}"]
    )
    promoted(one, other)
    assert client.wait(120) == 0
    assert sha256_of(got) == digest
    assert one.joined("connect") == 1


def test_iperf3(two: tuple[Host, Host]) -> None:
    one, other = two
    other.popen(["iperf3", "-s", "-1"], stdout=subprocess.DEVNULL)
    listening(other, 5201)
    client = one.popen(["iperf3", "-c", other.address, "-t", "3", "-J"], stdout=subprocess.PIPE, text=True)
    promoted(one, other, ends=1)
    output, _ = client.communicate(timeout=60)
    assert client.returncode == 0, output
