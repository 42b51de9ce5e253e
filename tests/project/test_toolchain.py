"""What a change of a C file costs the tests: that file is compiled again, and no other."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import toolchain

FILES = {
    "main.c": '#include "sum.h"\nint main(void) { return sum(1, -1); }\n',
    "sum.c": '#include "sum.h"\nint sum(int a, int b) { return a + b; }\n',
    "sum.h": "int sum(int, int);\n",
    "other.c": '#include "other.h"\nint other(void) { return OTHER; }\n',
    "other.h": "#define OTHER 1\n",
}


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that are really compiled from here on."""
    names: list[str] = []
    really = toolchain._compile

    def noted(argv: list[str], what: str, made: Path) -> None:
        names.append(what)
        really(argv, what, made)

    monkeypatch.setattr(toolchain, "_compile", noted)
    return names


def test_a_change_compiles_what_it_touches_and_nothing_else(tmp_path: Path, compiled: list[str]) -> None:
    def build(*flags: str) -> list[str]:
        compiled.clear()
        made = toolchain.build("sum", sorted(tmp_path.glob("*.c")), ["-O0", "-Wl,-z,now", *flags])
        subprocess.run([made], check=True)
        return sorted(compiled)

    for name, text in FILES.items():
        (tmp_path / name).write_text(f"{text}// {tmp_path}\n")  # nobody has compiled this before
    assert build() == ["main.c", "other.c", "sum.c"]
    assert build() == []
    with (tmp_path / "other.c").open("a") as file:
        file.write("// changed\n")
    assert build() == ["other.c"]
    with (tmp_path / "sum.h").open("a") as file:
        file.write("// changed\n")
    assert build() == ["main.c", "sum.c"]
    assert build("-Wl,-z,relro") == []  # linked again
    assert build("-DOTHER_FLAGS") == ["main.c", "other.c", "sum.c"]


def test_an_error_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "wrong.c").write_text("int main(void) { return nothing; }\n")
    with pytest.raises(pytest.fail.Exception, match=r"cannot build wrong\.c:\n(.*\n)*.*nothing"):
        toolchain.build("wrong", [tmp_path / "wrong.c"], [])
