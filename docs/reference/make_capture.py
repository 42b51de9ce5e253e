"""Draws docs/guides/capture.svg from what tshark prints of docs/guides/capture.pcapng; `--check` compares only.

The panes are Wireshark's: packets, one packet in layers, its bytes. `sidestep capture -w` wrote the file while
`sidestep rdma ping -n 3` ran. tshark is Wireshark's own dissector for terminals; of its words nothing is changed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from html import escape
from pathlib import Path
from typing import Final

GUIDES: Final = Path(__file__).parents[1] / "guides"
CAPTURE: Final = GUIDES / "capture.pcapng"
PICTURE: Final = GUIDES / "capture.svg"
CHOSEN: Final = 7  # the first ping
LAYERS: Final = "iwarp_mpa,iwarp_ddp_rdmap"
WIDTH: Final = 860
LINE: Final = 16  # from one line of text to the next
MARGIN: Final = 14
STYLE: Final = """
text { font: 12px ui-monospace, monospace; fill: #1f2430; white-space: pre; }
.page { fill: #ffffff; } .pane { fill: #f4f6fa; stroke: #c9ced8; } .chosen { fill: #cfe0fb; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6e9ef; } .page { fill: #14171d; } .pane { fill: #1c2129; stroke: #3a4250; } .chosen { fill: #24406e; }
}
"""


def printed(*options: str) -> list[str]:
    """Lines of tshark about the capture, whatever a user prefers."""
    env = os.environ | {"WIRESHARK_CONFIG_DIR": "/nonexistent", "TZ": "UTC", "LC_ALL": "C.UTF-8"}
    argv: list[str | Path] = ["tshark", "-n", "-r", CAPTURE, *options]
    return subprocess.run(argv, env=env, capture_output=True, text=True, check=True).stdout.strip("\n").split("\n")


def panes() -> tuple[list[str], list[str], list[str]]:
    """Lines of the three panes."""
    one = ("-Y", f"frame.number == {CHOSEN}")
    return printed(), printed(*one, "-O", LAYERS), printed(*one, "-x")


def box(kind: str, x: int, y: int, height: int) -> str:
    return f'<rect class="{kind}" x="{x}" y="{y}" width="{WIDTH - 2 * x}" height="{height}"/>'


def drawn() -> str:
    """The picture."""
    shapes, top = [], MARGIN
    for lines in panes():
        height = LINE * len(lines) + MARGIN
        shapes.append(box("pane", MARGIN, top, height))
        for number, line in enumerate(lines, 1):
            y = top + LINE * number
            if line.split()[:1] == [str(CHOSEN)]:
                shapes.append(box("chosen", MARGIN + 1, y - LINE + 4, LINE))
            shapes.append(f'<text x="{2 * MARGIN}" y="{y}" xml:space="preserve">{escape(line)}</text>')
        top += height + MARGIN
    shapes = [f"<style>{STYLE}</style>", f'<rect class="page" width="{WIDTH}" height="{top}"/>', *shapes]
    size = f'width="{WIDTH}" height="{top}" viewBox="0 0 {WIDTH} {top}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n' + "\n".join(shapes) + "\n</svg>\n"


def main() -> int:
    """Writes the picture, or returns 1 if it is not what tshark prints."""
    if sys.argv[1:] == ["--check"]:
        return int(PICTURE.read_text() != drawn())
    PICTURE.write_text(drawn())
    return 0


if __name__ == "__main__":
    sys.exit(main())
