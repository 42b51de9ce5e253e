"""Wireshark's dissector, for tests: what it sees in a capture.

Where it is not installed a test that needs it fails.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

import needed


def _output(capture: bytes, folder: Path, *options: str) -> str:
    tool = needed.program("tshark")
    file = folder / "capture.pcap"
    file.write_bytes(capture)
    return subprocess.run(
        [tool, "-2", "-n", "-r", file, *options], capture_output=True, text=True, timeout=60, check=True
    ).stdout


def shown(capture: bytes, folder: Path, fields: Sequence[str], only: str = "frame", *options: str) -> list[list[str]]:
    """These fields of all frames that a filter lets through."""
    columns = [part for field in fields for part in ("-e", field)]
    text = _output(
        capture, folder, "-Y", only, "-T", "fields", "-E", "separator=|", "-E", "occurrence=f", *columns, *options
    )  # fmt: skip
    return [line.split("|") for line in text.splitlines()]


def messages_seen(capture: bytes, folder: Path, protocol: str, only: str) -> list[bytes]:
    """The bytes that it takes for a message of one protocol, in each frame that a filter lets through."""
    found = json.loads(_output(capture, folder, "-Y", only, "-T", "jsonraw", "-j", protocol))
    return [bytes.fromhex(frame["_source"]["layers"][f"{protocol}_raw"][0]) for frame in found]


def told(capture: bytes, folder: Path, protocol: str) -> str:
    """All that it says about one protocol, as a person reads it."""
    return _output(capture, folder, "-Y", protocol, "-O", protocol)


def numbers(rows: list[list[str]]) -> list[tuple[int, ...]]:
    """The fields as numbers."""
    return [tuple(int(value, 0) if value else -1 for value in row) for row in rows]
