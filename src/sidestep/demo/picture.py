"""Bars with their figures, as an SVG that needs nothing else: no script, no font, no network; in light and in dark."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

WIDTH: Final = 760
MARGIN: Final = 24
BAR_AT: Final = 120  # left edge of bars: the name stands before
BAR_WIDTH: Final = 420  # length of the longest bar in its group
BAR_HEIGHT: Final = 14
LINE: Final = 20  # step from one line of text, or bar, to the next
LINE_CHARS: Final = 84  # characters of text that fit, in a wide font too

_STYLE: Final = """
text { font: 13px system-ui, sans-serif; fill: #1f2430; }
.page { fill: #ffffff; } .title { font-size: 20px; font-weight: 600; } .head { font-weight: 600; }
.muted { fill: #5c6473; } .warning { font-weight: 600; fill: #b3261e; }
.tcp { fill: #9aa3b2; } .ours { fill: #2b6fd6; } .slower { fill: #c2571a; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6e9ef; } .page { fill: #14171d; } .muted { fill: #9aa3b2; } .warning { fill: #ff8a80; }
  .tcp { fill: #6b7484; } .ours { fill: #5b9bff; } .slower { fill: #f0883e; }
}
"""


@dataclass(frozen=True, slots=True)
class Bar:
    """A figure; `kind` is its colour: tcp, ours or slower. The remark, a ratio say, stands at the right edge."""

    name: str
    value: float
    kind: str
    remark: str = ""


@dataclass(frozen=True, slots=True)
class Group:
    """Bars of one unit, on a scale of their own."""

    title: str
    unit: str
    bars: Sequence[Bar]
    lower_is_better: bool = False


def figure(value: float) -> str:
    """A number with three significant digits or so, and thousands apart."""
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 100 else f"{value:.2f}"


def slower(ratio: float) -> bool:
    """True if a ratio to kernel TCP is below 1 as it is shown."""
    return round(ratio, 2) < 1


def times(ratio: float) -> str:
    """A ratio to kernel TCP in words."""
    return f"{'slower ' if slower(ratio) else ''}{ratio:.2f}x"


def draw(title: str, groups: Sequence[Group], *, warnings: Sequence[str] = (), notes: Sequence[str] = ()) -> str:
    """The picture; warnings stand above the bars, notes below."""
    body, y = [_text(MARGIN, 40, title, "title")], 48

    def sentences(texts: Sequence[str], kind: str) -> None:
        nonlocal y
        for line in (line for text in texts for line in textwrap.wrap(text, LINE_CHARS)):
            y += LINE
            body.append(_text(MARGIN, y, line, kind))

    sentences(warnings, "warning")
    for group in groups:
        body += _group(group, y + 36)
        y += 36 + LINE * len(group.bars)
    y += 12
    sentences(notes, "muted")
    height = y + MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img">\n<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n'
        f'<rect class="page" width="{WIDTH}" height="{height}"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def _group(group: Group, y: int) -> Iterator[str]:
    better = "shorter" if group.lower_is_better else "longer"
    yield _text(MARGIN, y, group.title, "head")
    yield _text(WIDTH - MARGIN, y, f"{group.unit}, {better} is better", "muted", end=True)
    longest = max(bar.value for bar in group.bars) or 1
    for bar in group.bars:
        y += LINE
        width = max(BAR_WIDTH * bar.value / longest, 1)
        top = y - BAR_HEIGHT + 3  # text stands on y
        yield _text(MARGIN, y, bar.name, "muted")
        yield (f'<rect class="{bar.kind}" x="{BAR_AT}" y="{top}" width="{width:.1f}" height="{BAR_HEIGHT}" rx="2"/>')
        yield _text(BAR_AT + width + 8, y, figure(bar.value), "figure")
        if bar.remark:
            yield _text(WIDTH - MARGIN, y, bar.remark, "head", end=True)


def _text(x: float, y: int, text: str, kind: str, *, end: bool = False) -> str:
    anchor = ' text-anchor="end"' if end else ""
    return f'<text class="{kind}" x="{x:g}" y="{y}"{anchor}>{escape(text, quote=False)}</text>'
