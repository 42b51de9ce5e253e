"""How large files and functions may be, and who may know whom. As a script it prints rooms, lines, files and arrows."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Final

SOURCE: Final = Path(__file__).parents[2] / "src" / "sidestep"
NATIVE: Final = SOURCE / "native"
FILE_LINES_MAX: Final = 700
FOLDER_FILES_MAX: Final = 30  # this number only falls
FUNCTION_LINES_MAX: Final = 60

# The shim's files, from the lowest: nobody calls who stands behind him here.
SHIM: Final = (
    "channel", "shim_real", "shim_object", "shim_names", "shim", "shim_proc", "shim_receiver", "shim_environment",
    "shim_code", "shim_loader", "shim_signal", "shim_address", "shim_slot", "shim_doorbell", "shim_spin", "shim_arena",
    "shim_late", "shim_conn", "shim_count", "shim_slot_lock", "shim_relayed", "shim_end", "shim_room", "shim_switch",
    "shim_finish",
    "shim_refs", "shim_events", "shim_set_hints", "shim_stand_in", "shim_set",
    "shim_provider", "shim_serve", "shim_demote", "shim_inherited", "shim_tcp_only", "shim_pass", "shim_idle",
    "shim_answer", "shim_offer", "shim_new_doorbell", "shim_rpc", "shim_explicit", "shim_sdp_connect", "shim_fork",
    "shim_kernel_io", "shim_travel", "shim_set_return", "shim_rights", "shim_close", "shim_number",
    "shim_wait", "shim_ready", "shim_nest",
    "shim_call", "shim_tcp_wait", "shim_message", "shim_recv", "shim_send", "shim_epoll", "shim_poll", "shim_views",
    "shim_steps", "shim_io", "shim_files", "shim_ring", "shim_fd", "shim_option", "shim_socket", "shim_stdio",
    "shim_process", "shim_spawn", "shim_sandbox", "shim_syscall", "shim_embed", "shim_loaded", "shim_start",
)  # fmt: skip

# The rooms, from the lowest: a file imports nothing of a room behind its own. The modules beside the rooms are what all
# stand on ("base"), but for those that a program imports ("faces").
ROOMS: Final = (
    "native", "base", "rdma", "sdp", "policy", "switch", "remote", "provider", "observe", "api", "faces", "demo", "cli",
)  # fmt: skip
FACES: Final = {"__init__", "aio", "embed", "pytest_plugin", "rings", "socket", "testing"}

_BODY: Final = re.compile(r"^\{\n(.*?)^\}", re.M | re.S)
_COMMENT: Final = re.compile(r"/\*.*?\*/|^#.*?$", re.M | re.S)
_NAME: Final = re.compile(r"\b(?!__attribute__|constructor|TRACKED)(\w+) ?\(")


@cache
def sources() -> tuple[Path, ...]:
    return tuple(path for suffix in ("py", "c", "h") for path in sorted(SOURCE.rglob(f"*.{suffix}")))


@cache
def functions(path: Path) -> tuple[tuple[str, str, int], ...]:
    """Of each function of a C file what stands before its name, its name, and its lines."""
    text, found = path.read_text(encoding="utf-8"), []
    for body in _BODY.finditer(text):
        head = _COMMENT.sub("", text[: body.start()].rpartition("\n\n")[2])
        name = _NAME.search(head)
        assert name is not None, head
        found.append((head[: name.start()], name[1], body[1].count("\n")))
    return tuple(found)


def test_files_are_short() -> None:
    lines = {str(path.relative_to(SOURCE)): path.read_text(encoding="utf-8").count("\n") for path in sources()}
    assert {name: count for name, count in lines.items() if count > FILE_LINES_MAX} == {}


def test_folders_are_small() -> None:
    files = Counter(path.parent for path in SOURCE.rglob("*") if path.suffix in {".py", ".pyi", ".c", ".h", ".S"})
    assert {str(folder.relative_to(SOURCE)): count for folder, count in files.items() if count > FOLDER_FILES_MAX} == {}


def test_functions_are_short() -> None:
    lines = {name: count for path in sorted(NATIVE.rglob("*.c")) for _, name, count in functions(path)}
    assert len(lines) > 500
    assert {name: count for name, count in lines.items() if count > FUNCTION_LINES_MAX} == {}


def test_functions_in_python_are_short() -> None:
    lines: Counter[str] = Counter()
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                name = f"{path.relative_to(SOURCE)} {node.name}"  # of several called so the longest
                lines[name] = max(lines[name], node.end_lineno - node.lineno)
    assert len(lines) > 3000
    assert {name: count for name, count in lines.items() if count > FUNCTION_LINES_MAX} == {}


def test_nobody_of_the_shim_calls_up() -> None:
    assert {path.stem for path in NATIVE.glob("shim/*/*.c")} <= set(SHIM)
    files = {path.stem: path for path in NATIVE.rglob("*.c")}
    defined = {
        called: at
        for at, name in enumerate(SHIM)
        for before, called, _ in functions(files[name])
        if "static" not in before and "EXPORT" not in before
    }
    up = {
        name: sum(
            defined.get(one, at) > at
            for one in set(re.findall(r"\b(\w+)\(", _COMMENT.sub("", files[name].read_text())))
        )
        for at, name in enumerate(SHIM)
    }
    assert {name: count for name, count in up.items() if count} == {}


def room(parts: Sequence[str]) -> str:
    """Of a file's path under sidestep, or of what a dotted name names there."""
    first = parts[0].removesuffix(".py") if parts else "__init__"
    known = {"__main__": "cli"} | dict.fromkeys(FACES, "faces") | {name: name for name in ROOMS}
    return known.get(first, "base" if (SOURCE / f"{first}.py").exists() else "faces")


@cache
def arrows() -> Counter[tuple[str, str]]:
    """How often the files of one room import something of another."""
    found: Counter[tuple[str, str]] = Counter()
    for path in sorted(SOURCE.rglob("*.py")):
        own = room(path.relative_to(SOURCE).parts)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = (
                [f"{node.module}.{alias.name}" for alias in node.names] if isinstance(node, ast.ImportFrom)
                else [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            )  # fmt: skip
            for name in names:
                if name.startswith("sidestep.") and name != "sidestep.__version__":
                    found[own, room(name.split(".")[1:])] += 1
    return found


def test_no_room_imports_up() -> None:
    assert {path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists()} <= set(ROOMS)
    assert [one for one in arrows() if ROOMS.index(one[1]) > ROOMS.index(one[0])] == []


def test_the_provider_knows_other_hosts_by_the_switch_only() -> None:
    assert ("provider", "remote") not in arrows()


def show() -> None:
    """Prints each room with its files, its lines, and how often it imports of which other."""
    sizes = [(room(path.relative_to(SOURCE).parts), path.read_text(encoding="utf-8").count("\n")) for path in sources()]
    for name in ROOMS:
        own = [lines for at, lines in sizes if at == name]
        below = ", ".join(f"{other} {count}" for (at, other), count in arrows().items() if at == name != other)
        print(f"{name:8} {len(own):4} files {sum(own):6} lines  imports {below or 'nothing'}")
    between = sum(at != other for at, other in arrows())
    print(f"{'all':8} {len(sizes):4} files {sum(lines for _, lines in sizes):6} lines, {between} arrows between rooms")


if __name__ == "__main__":
    show()
