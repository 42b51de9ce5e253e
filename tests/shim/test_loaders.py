"""Programs that are executed under the shim and whose own loader would end them over it: they come to it by ours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import needed
import pytest
from common import PATIENCE_S

from sidestep.config import ENV_SOCKET
from sidestep.testing import Sidestep

pytestmark = pytest.mark.slow

SOURCE = r"""
#include <stdio.h>
#include <stdlib.h>
int main(void)
{
	const char *preload = getenv("LD_PRELOAD"), *kept = getenv("SIDESTEP_PRELOAD");
	return printf("%s|%s|%s\n", preload ? preload : "", kept ? kept : "", getenv("SIDESTEP_SOCKET")) < 0;
}
"""
STARTS = {
    "execve": "os.execve('{}', ['x'], dict(os.environ))",
    "execvpe": "os.execvp('program', ['x'])",
    "fexecve": "os.execve(os.open('{}', os.O_RDONLY), ['x'], dict(os.environ))",
    "posix_spawn": "os.waitpid(os.posix_spawn('{}', ['x'], dict(os.environ)), 0)",
    "posix_spawnp": "os.waitpid(os.posix_spawnp('program', ['x'], dict(os.environ)), 0)",
    "subprocess": "subprocess.run(['{}'], check=True)",
    "shell": "os.system('{}')",
}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("musl")
    (place / "program.c").write_text(SOURCE)
    subprocess.run([needed.program("musl-gcc"), place / "program.c", "-o", place / "program"], check=True, timeout=60)
    return place / "program"


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("others", ["", "libm.so.6"])
def test_a_program_of_another_c_library_is_started(sidestep: Sidestep, program: Path, start: str, others: str) -> None:
    """Other libraries that are to be loaded first stay what they are."""
    code = f"import os, subprocess; os.environ['LD_PRELOAD'] += ':{others}'; {STARTS[start].format(program)}"
    env = sidestep.env(PATH=f"/nowhere:{program.parent}:/usr/bin:/bin")
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    preload, kept, place = done.stdout.strip().split("|")
    assert place == env[ENV_SOCKET], done.stderr
    assert "sidestep" not in preload
    assert preload.strip(":") == others
    assert "sidestep" in kept  # for what it executes


def test_so_is_a_script_of_it(sidestep: Sidestep, program: Path, tmp_path: Path) -> None:
    (script := tmp_path / "script").write_text(f"#!{program} argument\n")
    script.chmod(0o755)
    done = sidestep.run([sys.executable, "-c", f"import os; os.execv({str(script)!r}, ['x'])"], stdout=subprocess.PIPE)
    assert done.stdout.startswith(b"|/")


def test_what_is_no_program_is_not_waited_for(sidestep: Sidestep, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o755)
    code = f"import os; os.execv({str(tmp_path / 'pipe')!r}, ['x'])"
    done = sidestep.run(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, timeout=PATIENCE_S, check=False
    )
    assert "PermissionError" in done.stderr


def test_a_program_of_this_c_library_keeps_the_shim(sidestep: Sidestep) -> None:
    code = "import os; os.execvp('env', ['env'])"
    done = sidestep.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert "libsidestep.so" in done.stdout
