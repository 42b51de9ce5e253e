"""The structures of libibverbs and librdmacm are declared as their headers have them."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from abi_offsets import HEADERS, declared, program

_KNOWN = Path(__file__).parent / "data" / "abi-offsets.txt"  # printed by the C program: x86_64, rdma-core 44


# The kernel's devices are used on such machines only: pointers and longs of the structures have 8 bytes.
@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "aarch64") or sys.maxsize < 1 << 32, reason="the table is of 64-bit machines"
)
def test_offsets_are_those_of_the_table() -> None:
    """What was printed once, so that a machine without the headers checks it too."""
    assert declared() == _KNOWN.read_text()


def test_offsets_are_those_of_the_headers(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")  # the table above is compared in any case
    probe = "".join(f"#include <{header}>\n" for header in HEADERS)
    found = subprocess.run([compiler, "-E", "-xc", "-"], input=probe, capture_output=True, text=True, check=False)
    if found.returncode:
        # They are no requirement of sidestep, and the table above is compared in any case.
        pytest.skip("the headers are missing: install libibverbs-dev and librdmacm-dev (CPATH may name another place)")
    source = tmp_path / "offsets.c"
    source.write_text(program())
    subprocess.run([compiler, "-o", tmp_path / "offsets", source], check=True)
    printed = subprocess.run([tmp_path / "offsets"], capture_output=True, text=True, check=True).stdout
    assert declared() == printed
