"""Where the fields of the libraries' structures lie: as ctypes has them, and a C program that asks the headers."""

from __future__ import annotations

import ctypes
from typing import Final

from sidestep.rdma.kernel.abi import STRUCTURES

HEADERS: Final = ("infiniband/verbs.h", "rdma/rdma_cma.h")


def _fields(structure: type[ctypes.Structure]) -> list[str]:
    return [str(entry[0]) for entry in structure._fields_ if not str(entry[0]).startswith("_")]


def declared() -> str:
    """A line for each field: structure, field, offset, size; and one for each structure that is declared whole."""
    lines = []
    for c_name, (each, whole) in STRUCTURES.items():
        for name in _fields(each):
            field = getattr(each, name)
            lines.append(f"{c_name} {name} {field.offset} {field.size}")
        if whole:
            lines.append(f"{c_name} - 0 {ctypes.sizeof(each)}")
    return "\n".join(lines) + "\n"


def program() -> str:
    """Prints the same lines as the headers have them. An unnamed or renamed field does not compile."""
    lines = [f"#include <{header}>" for header in HEADERS]
    lines += ["#include <stddef.h>", "#include <stdio.h>"]
    lines += ["int main(void)", "{"]
    for c_name, (each, whole) in STRUCTURES.items():
        for name in _fields(each):
            lines.append(
                f'\tprintf("{c_name} {name} %zu %zu\\n", offsetof({c_name}, {name}), sizeof((({c_name} *)0)->{name}));'
            )
        if whole:
            lines.append(f'\tprintf("{c_name} - 0 %zu\\n", sizeof({c_name}));')
    return "\n".join([*lines, "\treturn 0;", "}", ""])
