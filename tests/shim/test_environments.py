"""Programs that are given an environment of their caller's making: what is sidestep's goes on into it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import needed
import pytest
import toolchain
from selection import rotate

from sidestep import native_library
from sidestep.config import ENV_CARRY, ENV_DISABLE, ENV_SOCKET
from sidestep.testing import Sidestep

pytestmark = pytest.mark.slow

STARTS = [
    "execve", "execve-null", "execv", "execvp", "execvpe", "execl", "execlp", "execle", "fexecve", "execveat",
    "execveat-empty", "posix_spawn", "posix_spawnp", "system", "popen",
]  # fmt: skip


def _program(*flags: str) -> Path:
    name = "starts" + "".join(flags)
    return toolchain.build(name, [Path(__file__).parent / "programs/starts.c"], ["-D_GNU_SOURCE", "-w", *flags])


def _names(shown: str) -> dict[str, str]:
    """An environment as env shows it, but for what the shell adds."""
    found = dict(line.split("=", 1) for line in shown.splitlines())
    return {name: value for name, value in found.items() if name not in ("PWD", "OLDPWD", "SHLVL", "_")}


def _ours(sidestep: Sidestep, **changes: str) -> dict[str, str]:
    return {
        name: value
        for name, value in sidestep.env(**changes).items()
        if name.startswith("SIDESTEP_") or name == "LD_PRELOAD"
    }


def _started(sidestep: Sidestep, *argv: str | Path, **changes: str) -> dict[str, str]:
    done = sidestep.run(list(argv), env=sidestep.env(**changes), stdout=subprocess.PIPE, text=True)
    return _names(done.stdout)


@pytest.mark.parametrize("how", rotate(STARTS, test=3, ci=8))
@pytest.mark.parametrize("flags", [(), ("-static",)], ids=["dynamic", "static"])
def test_what_is_ours_goes_on(sidestep: Sidestep, how: str, flags: tuple[str, ...]) -> None:
    own = {"A": "b"} if how in ("execvpe", "execle", "posix_spawnp") else {}
    assert _started(sidestep, _program(*flags), how, "/usr/bin/env") == _ours(sidestep) | own


def test_values_go_on_through_a_shell_as_they_are(sidestep: Sidestep) -> None:
    strange = """it's "$HOME" `x` \\ ;"""
    found = _started(sidestep, _program(), "system", "/usr/bin/env", SIDESTEP_LOG=strange)
    assert found == _ours(sidestep, SIDESTEP_LOG=strange)
    Path(strange).unlink(missing_ok=True)


def test_other_libraries_do_not(sidestep: Sidestep) -> None:
    """They came by the same name, and the program has dropped that."""
    found = _started(sidestep, "env", "-i", "env", LD_PRELOAD=f"libm.so.6 {native_library()}")
    assert found == _ours(sidestep)


def test_a_script_and_its_interpreter_go_on(sidestep: Sidestep, tmp_path: Path) -> None:
    (script := tmp_path / "script").write_text("#!/bin/sh\n/usr/bin/env\n")
    script.chmod(0o755)
    assert "LD_PRELOAD" in sidestep.run(["env", "-i", script], stdout=subprocess.PIPE, text=True).stdout


@pytest.mark.parametrize(
    "kept", ["LD_PRELOAD=", "LD_PRELOAD=libm.so.6", f"{ENV_DISABLE}=1", f"{ENV_SOCKET}=/elsewhere"]
)
def test_who_sets_one_name_means_it(sidestep: Sidestep, kept: str) -> None:
    name, _, value = kept.partition("=")
    assert _started(sidestep, "env", "-i", kept, "env") == {name: value}


def test_who_takes_out_the_path_as_well_cleans(sidestep: Sidestep) -> None:
    """As inetd does, which takes out what may harm."""
    assert "LD_PRELOAD" in _started(sidestep, "/usr/bin/env", "-u", "LD_PRELOAD", "-u", "PATH", "/usr/bin/env")


def test_who_takes_out_one_name_means_it(sidestep: Sidestep) -> None:
    assert "LD_PRELOAD" not in _started(sidestep, "env", "-u", "LD_PRELOAD", "env")


@pytest.mark.parametrize("off", [{ENV_CARRY: "0"}, {ENV_DISABLE: "1"}], ids=["no-carry", "disabled"])
def test_nothing_goes_on(sidestep: Sidestep, off: dict[str, str]) -> None:
    assert _started(sidestep, "env", "-i", "env", **off) == {}


def test_without_a_setting_of_ours_nothing_tells_what_was_meant(sidestep: Sidestep) -> None:
    """Such as LD_PRELOAD alone, set by hand: `env -u LD_PRELOAD` leaves the same environment as `env -i`."""
    env = {"LD_PRELOAD": str(native_library()), "PATH": os.defpath}
    done = sidestep.run(["env", "-i", "env"], env=env, stdout=subprocess.PIPE)
    assert done.stdout == b""


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory where set-id bits count, which pytest's own need not be."""
    with tempfile.TemporaryDirectory(prefix="sidestep-rights-", dir=Path(__file__).parent) as made:
        yield Path(made)


def test_a_program_with_more_rights_is_left_out(sidestep: Sidestep, place: Path) -> None:
    program = Path(shutil.copy(needed.program("env"), place))
    program.chmod(0o4755)
    assert _started(sidestep, "env", "-i", program) == {}


def test_a_program_that_gets_a_secure_execution_is_left_out(sidestep: Sidestep) -> None:
    """Its loader would ignore the library."""
    code = "import os; os.setresuid(0, 65534, 0); os.execve('/usr/bin/env', ['env'], {})"
    assert _started(sidestep, sys.executable, "-c", code) == {}


def test_a_root_without_the_library_is_left_out(sidestep: Sidestep, tmp_path: Path) -> None:
    """The loader would complain into the program's stderr."""
    root = tmp_path / "root"
    for file in ("/usr/bin/env", *_libraries("/usr/bin/env")):
        (to := root / file.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, to)
    code = f"import os; os.chroot({str(root)!r}); os.chdir('/'); os.execve('/usr/bin/env', ['env'], {{'A': 'b'}})"
    done = sidestep.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("A=b\n", "")


def _libraries(program: str) -> list[str]:
    listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    return [word for word in listed.split() if word.startswith("/")]


def test_fakeroot_works(sidestep: Sidestep) -> None:
    """It has an LD_PRELOAD of its own, and programs whose environment is emptied are out of it as without sidestep."""
    fakeroot, owned = (
        needed.program("fakeroot"),
        'touch "$1"; chown 7:8 "$1"; stat -c %u:%g "$1"; env -i stat -c %u:%g "$1"',
    )
    with tempfile.NamedTemporaryFile() as file:
        argv = [fakeroot, "sh", "-c", owned, "sh", file.name]
        under = sidestep.run(argv, capture_output=True, text=True)
        plain = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert (under.stdout, under.stderr) == (plain.stdout, plain.stderr)
    assert plain.stdout.startswith("7:8\n")


SERVER = """
import socket
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
one, _ = server.accept()
while data := one.recv(65536):
    one.sendall(data)
"""
CLIENT = """
import select, socket, sys
one = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
while not select.select([sys.stdin], [], [], 0)[0]:
    one.sendall(bytes(1000))
    assert len(one.recv(1000, socket.MSG_WAITALL)) == 1000
"""


def test_its_connections_are_promoted(sidestep: Sidestep) -> None:
    server = sidestep.popen(["env", "-i", sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    argv = [sys.executable, "-c", CLIENT, server.stdout.readline().strip()]
    client = sidestep.popen(argv, stdin=subprocess.PIPE)
    sidestep.wait_for(lambda found: len(found) == 2 and all(c.promoted for c in found))
    client.communicate(b"end\n", timeout=60)
    assert (client.returncode, server.wait(60)) == (0, 0)
