"""Which programs the shim gets into: real programs, built or changed on the spot."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from foreign_programs import put_out_of_reach

from sidestep import places
from sidestep.errors import Unavailable
from sidestep.observe import preload_check as reach

Build = Callable[..., Path]


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Compiles an empty program with these options of the compiler."""

    def compile_with(*options: str) -> Path:
        program = tmp_path_factory.mktemp("program") / "program"
        source = program.with_suffix(".c")
        source.write_text("int main(void) { return 0; }\n")
        subprocess.run(["cc", source, "-o", program, *options], check=True)
        return program

    return compile_with


@pytest.fixture
def no_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where ours does not work."""
    monkeypatch.setattr(reach, "loader", lambda: None)


def codes(path: str | Path) -> list[str]:
    return [obstacle.code for obstacle in reach.obstacles(path)]


@pytest.mark.parametrize("options", [(), ("-no-pie",), ("-pie",)])
def test_dynamic_programs_are_reached(build: Build, options: tuple[str, ...]) -> None:
    assert codes(build(*options)) == []


@pytest.mark.parametrize("options", [("-static",), ("-static-pie",)])
def test_static_programs_are_by_our_loader(build: Build, options: tuple[str, ...]) -> None:
    found = reach.inspect(build(*options))
    assert (found.obstacles, found.loader) == ((), places.loader())


@pytest.mark.usefixtures("no_loader")
@pytest.mark.parametrize("options", [("-static",), ("-static-pie",)])
def test_without_it_they_are_not(build: Build, options: tuple[str, ...]) -> None:
    assert codes(build(*options)) == ["static"]


def test_what_the_loader_refuses_is_told(build: Build) -> None:
    (obstacle,) = reach.obstacles(put_out_of_reach(build("-static")))
    assert obstacle.code == "static"
    assert "section" in obstacle.text


@pytest.mark.usefixtures("no_loader")
def test_another_c_library_is_told_by_the_loader(build: Build) -> None:
    assert codes(build("-Wl,--dynamic-linker=/lib/ld-musl-x86_64.so.1")) == ["libc"]


def test_another_machine_or_word_size_is_told(build: Build) -> None:
    program = build()
    data = bytearray(program.read_bytes())
    data[4] = 1  # ELFCLASS32
    program.write_bytes(data)
    assert codes(program) == ["machine"]
    data[4] = 2
    struct.pack_into("=H", data, 18, 0xF7 if os.uname().machine != "riscv64" else 62)
    struct.pack_into("=H", data, 18, 243)  # RISC-V
    program.write_bytes(data)
    assert codes(program) == ["machine"]


def test_a_go_program_is_told_by_its_sections(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    program = build()
    section = program.with_suffix(".section")
    section.write_bytes(b"x")
    subprocess.run(["objcopy", "--add-section", f".go.buildinfo={section}", program], check=True)
    assert reach.inspect(program).loader == places.loader()
    monkeypatch.setattr(reach, "loader", lambda: None)
    assert codes(program) == ["go"]


def test_a_script_is_judged_by_its_interpreter(build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    static = build("-static")
    script = tmp_path / "script"
    script.write_text(f"#! {static} -x\n")
    wrapper = tmp_path / "wrapper"
    wrapper.write_text(f"#!{script}\n")
    script.chmod(0o755)
    assert reach.inspect(script).loader == reach.inspect(wrapper).loader == places.loader()
    monkeypatch.setattr(reach, "loader", lambda: None)
    assert codes(script) == codes(wrapper) == ["static"]
    assert reach.inspect(wrapper).chain == (str(wrapper), str(script), str(static))


def test_env_in_a_script_is_looked_through(build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    static = build("-static")
    monkeypatch.setenv("PATH", f"{static.parent}:{os.environ['PATH']}")
    script = tmp_path / "script"
    script.write_text("#!/usr/bin/env -S A=b program -u\n")
    assert reach.inspect(script).chain[-1] == str(static)


def test_scripts_in_a_circle_come_to_an_end(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text(f"#!{script}\n")
    assert codes(script) == ["format"]


def test_what_is_no_program_is_told(tmp_path: Path) -> None:
    for text in (b"", b"hello\n", b"#!\n", b"\x7fELF", b"\x7fELF" + bytes(100)):
        (tmp_path / "file").write_bytes(text)
        assert codes(tmp_path / "file"), text


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("#!/no/such/shell -e", "/no/such/shell"),
        ("#!/bin/sh\r", r"'/bin/sh\r'"),
        ("#!/usr/bin/env no-such-shell", "no-such-shell"),
        ("#!/usr/bin/env -S A=b no-such-shell -x", "no-such-shell"),
    ],
)
def test_a_missing_interpreter_is_told_by_its_name(tmp_path: Path, line: str, name: str) -> None:
    script = tmp_path / "script"
    script.write_text(line + "\n", newline="")
    (found,) = reach.obstacles(script)
    assert (found.code, found.verdict) == (
        "interpreter", f"cannot be executed: its interpreter {name} is not found"
    )  # fmt: skip


def test_a_script_without_an_interpreter_is_told_how_to_run(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("echo hello\n")
    (found,) = reach.obstacles(script)
    assert found.code == "shebang"
    assert found.remedy.endswith(f"sidestep run -- sh {script}")


def test_what_cannot_be_read_is_told(tmp_path: Path) -> None:
    assert codes(tmp_path / "missing") == ["unreadable"]
    assert codes(tmp_path) == ["unreadable"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a program away")
@pytest.mark.parametrize(("mode", "owner", "expected"), [
    (0o4755, 12345, ["setid"]), (0o2755, 12345, ["setid"]), (0o4755, 0, []), (0o755, 12345, []),
])  # fmt: skip
def test_a_program_that_changes_its_user_is_told(build: Build, mode: int, owner: int, expected: list[str]) -> None:
    program = build()
    os.chown(program, owner, owner)
    program.chmod(mode)
    assert codes(program) == expected


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a program capabilities")
def test_a_program_with_capabilities_is_told_how_to_lose_them(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    program = build()
    net_raw = struct.pack("<IIIII", 0x02000001, 1 << 13, 0, 0, 0)  # struct vfs_cap_data, revision 2, effective
    try:
        os.setxattr(program, "security.capability", net_raw)
    except OSError as error:
        pytest.skip(f"no capabilities here: {error.strerror}")
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    (found,) = reach.obstacles(program)
    assert "capabilities" in found.text
    assert "a copy of it" in found.remedy


def test_real_programs_of_this_machine_are_reached() -> None:
    assert codes(Path(sys.executable)) == []
    assert codes(reach.find("sh")) == []
    with pytest.raises(Unavailable):
        reach.find("no-such-program-anywhere")


@pytest.mark.parametrize("seed", range(20))
def test_a_damaged_program_file_is_no_fault_of_ours(build: Build, seed: int) -> None:
    program = build()
    data = bytearray(program.read_bytes())
    start = 16 + seed * 2
    data[start : start + 8] = b"\xff" * 8
    program.write_bytes(data)
    reach.obstacles(program)  # whatever it says, it says it without an exception
