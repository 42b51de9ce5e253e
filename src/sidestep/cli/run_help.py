"""The options of `sidestep run` in words, and its help page, which needs no click: it would take most of the time."""

from __future__ import annotations

import os
import sys
import textwrap

from sidestep import places
from sidestep.native import defaults

USAGE = "[--] CMD [ARG]..."
ABOUT = """\
Run CMD; its TCP connections to other such programs on this host go through shared memory.

A provider is started if none runs. Where something is missing CMD runs on plain TCP, and stderr says why. Lasting
causes (CMD is static; root's own provider leaves others out) are shown on a terminal only, and in the file
SIDESTEP_LOG. Ends as CMD does; 126 if CMD cannot be executed, 127 if it is not found.

What CMD starts is under sidestep, too. So is a program whose environment its
starter has made anew, as 'env -i' and nginx's upgrade do, unless --no-carry is given.

Without --stats this process becomes CMD. With it CMD is its child, and gets its signals. The
connections of CMD and its forks are counted as far as 'sidestep ss --ended' knows them.
"""
SOCKET = (
    f"Socket of the provider (default: ${places.ENV_SOCKET}, else {defaults.SYSTEM_SOCKET} if it answers, else one in "
    "the user's runtime directory). Its own directory has mode 0700, and is made if missing."
)
# Name -> its value, if it takes one, and what the page says of it. In the page's order.
OPTIONS = {
    "--promote-after": (
        "CALLS[:BYTES]", "Promote after so many reads and writes, or bytes (left out: 65536); 0: at once.",
    ),
    "--ring-size": ("BYTES", "Size of a channel in each direction, such as 256K."),
    "--spin-us": (
        "MICROSECONDS",
        f"Time that a wait may spin before it sleeps, at most {defaults.SPIN_US_MAX}; 0: never.",
    ),
    "--no-carry": ("", "Leave out the programs that CMD starts with an environment of its own making."),
    "--require": ("", "Do not start CMD where it would run on plain TCP: exit code 125."),
    "--stats": ("", "Say on stderr, when CMD has ended, what was saved."),
    "--socket": ("PATH", SOCKET),
    "-h, --help": ("", "Show this message and exit."),
}  # fmt: skip
WIDEST = 100  # columns
NARROWEST = 50


def page() -> str:
    """Help page of `sidestep run`, as wide as the terminal."""
    try:
        width = os.get_terminal_size(sys.__stdout__.fileno()).columns if sys.__stdout__ else 80
    except (OSError, ValueError):
        width = 80
    width = max(min(width, WIDEST) - 2, NARROWEST)
    wrapped = [
        textwrap.fill(about, width, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
        for about in ABOUT.split("\n\n")
    ]
    lines = [f"Usage: sidestep run [OPTIONS] {USAGE}", "", "\n\n".join(wrapped), "", "Options:"]
    names = [f"{name} {value}".rstrip() for name, (value, _) in OPTIONS.items()]
    column = max(map(len, names)) + 4
    for name, (_, text) in zip(names, OPTIONS.values(), strict=True):
        told = textwrap.fill(text, width, initial_indent=" " * column, subsequent_indent=" " * column)
        lines.append(f"  {name:{column - 2}}{told[column:]}")
    return "\n".join(lines)
