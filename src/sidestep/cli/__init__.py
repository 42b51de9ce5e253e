"""The `sidestep` command: files of subcommands, loaded when they are used.

stdout is data, stderr is talk. Exit codes: 0 done, 1 could not be done, 2 wrong usage; `sidestep run` ends as its
program does.

Programs under sidestep are started through this file, so it imports next to nothing: click takes longer to load than
Python itself.
"""

from __future__ import annotations

import errno
import gc
import os
import sys

from sidestep.errors import SidestepError

# Name -> its line of the help page, and the module that defines a click command of that name, or MODULE:NAME. In the
# page's order.
SECTIONS = {
    "Programs and their connections": {
        "run": ("Run a program under sidestep.", "sidestep.cli.run"),
        "service": ("Run services of systemd under sidestep.", "sidestep.cli.service"),
        "bundle": ("Write what programs need in a root without glibc.", "sidestep.cli.service"),
        "ss": ("List the connections: state, why, and what went which way.", "sidestep.cli.ss"),
        "explain": ("Explain what carries a connection, or what keeps it on TCP.", "sidestep.cli.explain"),
        "top": ("Watch the connections: rates, how much by ring, at what cost.", "sidestep.cli.top"),
        "metrics": ("Print metrics in Prometheus' text format, or serve them.", "sidestep.cli.metrics"),
        "demote": ("Send live connections back to TCP, losing nothing.", "sidestep.cli.demote"),
        "promote": ("Let these be promoted again.", "sidestep.cli.demote"),
        "check": ("Predict whether a program's connections can be promoted here.", "sidestep.cli.doctor"),
        "demo": ("Compare real programs over kernel TCP and under sidestep.", "sidestep.cli.demo"),
    },
    "The provider, which pairs the two ends": {
        "provider": ("Start, stop or look at it, and its modules.", "sidestep.cli.provider"),
        "policy": ("Check the rules of what is offloaded, try a connection.", "sidestep.cli.policy"),
        "doctor": ("Check this machine, and the shim in a program; say what to do.", "sidestep.cli.doctor"),
    },
    "RDMA and SDP": {
        "gateway": ("Relay between TCP and SDP, for hosts that know only one.", "sidestep.cli.gateway"),
        "sdp": ("SDP messages, captures and conversations in words.", "sidestep.cli.group:sdp"),
        "rdma": ("RDMA on any machine: devices, and tools to try them.", "sidestep.cli.group:rdma"),
        "capture": ("Capture what software RDMA devices send, for Wireshark.", "sidestep.cli.capture"),
    },
}
COMMANDS = {name: known for section in SECTIONS.values() for name, known in section.items()}
# Libraries that are not installed with every sidestep, and the packages that bring them, as in pyproject.toml.
EXTRAS = {
    "pcapng": "python-pcapng>=2.1.1,<3", "prometheus_client": "prometheus-client>=0.20", "rich": "textual>=1",
    "textual": "textual>=1",
}  # fmt: skip

ABOUT = "Run TCP programs over shared memory, unchanged."
EXIT_CODES = """Exit codes: 0 done, 1 could not be done, 2 wrong usage; `run` ends as its
program does."""
OPTIONS = {"--version": "Show the version and exit.", "-h, --help": "Show this message and exit."}

DEBIAN_MODULES = "/usr/lib/python3/"  # the place of Debian's packages, where pip may not install


def main() -> None:
    """The entry point: errors of ours become two lines on stderr and exit code 1, a missing extra the same and 2."""
    gc.disable()  # loading modules makes nothing to collect; the group enables it again
    try:
        words = sys.argv[1:]
        if command := plain_run(words):
            from sidestep.cli.start import start

            start(command)
        elif words in (["-h"], ["--help"]):
            print(page(), flush=True)  # noqa: T201 - click is not loaded
        elif words in (["run", "-h"], ["run", "--help"]):
            from sidestep.cli import run_help

            print(run_help.page(), flush=True)  # noqa: T201
        elif words == ["ss"]:
            from sidestep import config
            from sidestep.cli.ss_table import print_table
            from sidestep.observe.connections import connections

            gc.freeze()
            gc.enable()
            print_table(connections(config.socket_path()))
            sys.stdout.flush()
        else:
            from sidestep.cli.group import cli

            gc.freeze()  # collections, and the one at the exit, leave out click
            cli(prog_name="sidestep")
    except SidestepError as error:
        _fail(error.message, error.remedy)
    except ImportError as error:
        if (library := (error.name or "").partition(".")[0]) not in EXTRAS:
            raise
        lacking = "not installed" if isinstance(error, ModuleNotFoundError) else "too old"
        _fail(f"{library} is {lacking} for {sys.executable}", _remedy(library, lacking), code=2)
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # a second failure at the exit would be shown
        sys.exit(1)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _fail(f"not all of it could be written: {error.strerror}", "make room, or write elsewhere")


def _remedy(library: str, lacking: str) -> str:
    if not __file__.startswith(DEBIAN_MODULES):
        return f"{sys.executable} -m pip install '{EXTRAS[library]}'"
    if lacking == "too old" or library == "pcapng":  # Debian has no newer one, or none
        return f"install sidestep's wheel in a virtual environment, and there: pip install '{EXTRAS[library]}'"
    return f"apt install python3-{library.replace('_', '-')}"


def page() -> str:
    """The help page of the command itself."""
    width = max(map(len, COMMANDS))  # one column for all sections
    lines = ["Usage: sidestep [OPTIONS] COMMAND [ARGS]...", "", f"  {ABOUT}", ""]
    lines += [f"  {line}" for line in EXIT_CODES.splitlines()]
    lines += ["", "Options:", *(f"  {name:10}  {text}" for name, text in OPTIONS.items())]
    for title, section in SECTIONS.items():
        lines += ["", f"{title}:", *(f"  {name:{width}}  {text}" for name, (text, _) in section.items())]
    return "\n".join(lines)


def plain_run(words: list[str]) -> list[str]:
    """CMD of `run [--] CMD`, which needs no parser, as it is without options; nothing of any other command line."""
    if words[:1] != ["run"]:
        return []
    if words[1:2] == ["--"]:
        return words[2:]
    return words[1:] if not words[1:] or not words[1].startswith("-") else []


def _fail(message: str, hint: str = "", code: int = 1) -> None:
    print(f"sidestep: {message}", file=sys.stderr)  # noqa: T201 - click is not loaded yet
    if hint:
        print(f"hint: {hint}", file=sys.stderr)  # noqa: T201
    sys.exit(code)
