"""The structures of libibverbs and librdmacm are declared as their headers have them."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import toolchain
from abi_offsets import HEADERS, declared, program

from sidestep import limits

_KNOWN = Path(__file__).parent / "data" / "abi-offsets.txt"  # printed by the C program: x86_64, rdma-core 44


# The kernel's devices are used on such machines only: pointers and longs of the structures have 8 bytes.
_of_64_bits = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "aarch64") or sys.maxsize < 1 << 32, reason="the table is of 64-bit machines"
)


@_of_64_bits
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


@_of_64_bits
def test_the_engine_has_them_alike(tmp_path: Path) -> None:
    """native/engine/verbs_abi.h, which declares what it uses."""
    own = {"struct ibv_sge": "verbs_sge", "struct ibv_recv_wr": "verbs_recv_wr", "struct ibv_wc": "verbs_wc"}
    own["struct ibv_send_wr"] = "verbs_send_wr"
    lines = [line.split() for line in declared().replace("struct ", "struct-").splitlines()]
    expected = [(own[name], *rest) for each, *rest in lines if (name := each.replace("-", " ")) in own]
    expected = [line for line in expected if line[1] not in ("wr", "qp_type", "bind_mw")]  # none of a Send
    source = ["#include <stdio.h>", '#include "verbs_abi.h"', "int main(void)", "{"]
    for structure, field, *_ in expected:
        where, size = f"offsetof(struct {structure}, {field})", f"sizeof(((struct {structure} *)0)->{field})"
        if field == "-":
            where, size = "(size_t)0", f"sizeof(struct {structure})"
        source.append(f'\tprintf("{structure} {field} %zu %zu\\n", {where}, {size});')
    (tmp_path / "offsets.c").write_text("\n".join([*source, "\treturn 0;", "}", ""]))
    made = toolchain.build("verbs_offsets", [tmp_path / "offsets.c"], [])
    printed = subprocess.run([made], capture_output=True, text=True, check=True).stdout
    assert [tuple(line.split()) for line in printed.splitlines()] == expected
    assert len(expected) > 25


def test_the_engines_bounds_are_those_of_python() -> None:
    text = (toolchain.NATIVE / "engine/engine_verbs.h").read_text()
    assert re.search(rf"#define VERBS_SENDS {limits.VERBS_ENGINE_SENDS}u", text)
    assert re.search(rf"#define VERBS_INLINE_MAX {limits.VERBS_INLINE_MAX}u", text)
