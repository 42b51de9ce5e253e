"""What the shells offer at TAB, by click's scripts, which the package brings as files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent
LOADED = """
complete() { :; }; compdef() { :; }; compopt() { :; }
source <(_SIDESTEP_COMPLETE=${0}_source sidestep)
"""
# click's function, called as the shell calls it at the end of the line
AT_TAB = {
    "bash": """
        COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _sidestep_completion sidestep; printf "%s\\n" "${COMPREPLY[@]}"
    """,
    "zsh": """
        _describe() { print -lr -- ${(P)3} }; compadd() { print -lr -- ${(P)5} }
        words=("$@"); CURRENT=$#; _sidestep_completion
    """,
    "fish": """
        env _SIDESTEP_COMPLETE=fish_source sidestep | source
        complete --do-complete (string join ' ' -- $argv)
    """,
}


def offered(shell: str, *words: str) -> set[str]:
    """The words that may stand in the place of the last one, without what is said of them."""
    script = AT_TAB[shell] if shell == "fish" else LOADED + AT_TAB[shell]
    arguments = words if shell == "fish" else (shell, *words)
    env = os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}"}
    quiet = {"bash": "--norc", "zsh": "-f", "fish": "--no-config"}[shell]
    found = subprocess.run(
        [shell, quiet, "-c", script, *arguments], env=env, capture_output=True, text=True, check=True
    )
    assert found.stderr == ""
    return {re.split(r"[:\t]", line)[0] for line in found.stdout.splitlines()}


@pytest.mark.slow
@pytest.mark.parametrize("shell", AT_TAB)
def test_commands_options_and_values_are_offered(shell: str) -> None:
    assert {"run", "ss", "explain", "capture"} <= offered(shell, "sidestep", "")
    assert {"--pid", "--state", "--json"} <= offered(shell, "sidestep", "ss", "--")
    assert offered(shell, "sidestep", "ss", "--state", "p") == {"promoted", "pinned"}
    assert offered(shell, "sidestep", "provider", "sta") == {"start", "status"}
