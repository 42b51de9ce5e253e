"""The numbers of explicit sockets: the same in C and in Python, and nobody else's."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from pathlib import Path

import needed
import pytest

import sidestep
from sidestep import constants, installation, limits
from sidestep.errors import Unavailable
from sidestep.native import layout

FAMILIES = [name for name in layout.EXPLICIT_NUMBERS if name.startswith("AF_")]

PROGRAM = """
#include <netinet/in.h>
#include <stdio.h>
#include "sidestep.h"

int main(void)
{
%s
	int fd = sidestep_socket(AF_INET6_DIRECT, SOCK_STREAM, 0), domain = -1;
	socklen_t len = sizeof domain;
	if (fd < 0 || getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &len) < 0)
		return 1;
	printf("%%d\\n", domain == AF_INET6);
	printf("%%d\\n", sidestep_socket(AF_INET_OFFLOAD, SOCK_STREAM, IPPROTO_SDP) < 0 && errno == EAFNOSUPPORT);
	printf("%%d\\n", sidestep_socket(-7, SOCK_STREAM, 0) < 0 && errno == EAFNOSUPPORT);
	return 0;
}
"""


@pytest.mark.parametrize(("compiler", "standard"), [("cc", "-std=c99"), ("c++", "-std=c++11")])
def test_c_programs_have_the_same_numbers(tmp_path: Path, compiler: str, standard: str) -> None:
    needed.program(compiler)
    source = tmp_path / ("program.cc" if compiler == "c++" else "program.c")
    source.write_text(PROGRAM % "\n".join(f'\tprintf("%d\\n", {name});' for name in layout.EXPLICIT_NUMBERS))
    warnings = ["-Wall", "-Wextra", "-Wpedantic", "-Werror", standard, "-D_GNU_SOURCE"]
    subprocess.run([compiler, *warnings, f"-I{sidestep.include_dir()}", source, "-o", tmp_path / "program"], check=True)
    env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    said = subprocess.run([tmp_path / "program"], capture_output=True, text=True, check=True, env=env).stdout.split()
    assert [int(number) for number in said] == [getattr(layout, name) for name in layout.EXPLICIT_NUMBERS] + [1, 1, 1]


def test_python_programs_have_the_same_numbers() -> None:
    assert sorted(constants.__all__) == sorted(layout.EXPLICIT_NUMBERS)
    assert {name: getattr(constants, name) for name in constants.__all__} == {
        name: getattr(layout, name) for name in layout.EXPLICIT_NUMBERS
    }


def test_no_kernel_gives_these_families_to_anything() -> None:
    assert len({getattr(layout, name) for name in FAMILIES}) == len(FAMILIES)
    for name in FAMILIES:
        assert 256 < getattr(layout, name) < 2**16  # sa_family_t
        with pytest.raises(OSError, match="not supported"):
            socket.socket(getattr(layout, name))


def test_no_ip_header_holds_the_protocol() -> None:
    assert 2**16 < layout.IPPROTO_SDP < 2**31  # an int
    assert layout.IPPROTO_OFFLOAD_ANY == socket.IPPROTO_IP


def test_the_shim_waits_as_long_as_the_limits_say() -> None:
    text = (Path(layout.__file__).parent / "shim/provider/shim_rpc.c").read_text()
    for name, limit_s in (("ASK", limits.EXPLICIT_ASK_TIMEOUT_S), ("NAMED", limits.EXPLICIT_NAMED_TIMEOUT_S)):
        found = re.search(rf"#define {name}_TIMEOUT_NS (\d+)", text)
        assert found is not None
        assert int(found[1]) == limit_s * 10**9


def test_a_header_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(installation, "__file__", str(tmp_path / "a" / "b" / "installation.py"))
    with pytest.raises(Unavailable, match=r"sidestep\.h is missing"):
        sidestep.include_dir()
