"""Text of `sidestep top`: the same lines for the live screen and for `--once`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from sidestep.cli.shown import cut, per_message, percent, short
from sidestep.errors import counted
from sidestep.observe.connections import Connection
from sidestep.observe.device_totals import DeviceActivity
from sidestep.observe.links import line, summary
from sidestep.observe.traffic import Activity, Rate, View

_STATES: Final = ("promoted", "attached", "offered", "native", "pinned")  # columns in the order in which they are shown

# Orders of the rows: the busiest first, or by name.
SORTS: Final[Mapping[str, Callable[[Activity], tuple[object, ...]]]] = {
    "messages": lambda one: (-one.rate.messages, -one.rate.payload_len),
    "bytes": lambda one: (-one.rate.payload_len, -one.rate.messages),
    "total": lambda one: (-_carried(one.connection),),
    "state": lambda one: (_STATES.index(one.connection.state), one.connection.reason or "", -one.rate.messages),
    "program": lambda one: (one.connection.program or "", one.connection.pid, one.connection.fd),
    "age": lambda one: (one.connection.age_s,),
}
HEAD_LINES: Final = 5  # lines before the column headings; more if connections go to other hosts
_DEVICES_MAX: Final = 4  # devices that have a line
# Parts of a device, and the words for those of its counters that are shown.
_DEVICE_RATES: Final = {
    "packets": {
        "packets_sent": "sent", "packets_received": "received", "packets_resent": "resent", "packet_dropped": "dropped",
    },
    "bytes": {"stream_bytes_sent": "sent", "stream_bytes_received": "received"},
}  # fmt: skip
_ENDS_MIN: Final = 15  # columns; as ":6379 <- :54321" takes
_LOOPBACK: Final = frozenset({"127.0.0.1", "[::1]", "[::ffff:127.0.0.1]"})


@dataclass(frozen=True, slots=True)
class _Column:
    heading: str
    width: int
    cell: Callable[[Activity], str]
    number: bool = True


_COLUMNS: Final = (
    _Column("PROGRAM", 10, lambda one: one.connection.who, number=False),
    _Column("PID", 7, lambda one: str(one.connection.pid)),
    _Column("CONNECTION", 0, lambda one: _ends(one.connection), number=False),  # takes what is left
    _Column("STATE", 8, lambda one: one.connection.state, number=False),
    _Column("MSG/S", 5, lambda one: short(one.rate.messages)),
    _Column("B/S", 5, lambda one: short(one.rate.payload_len)),
    _Column("RING", 4, lambda one: percent(one.rate.ring_share)),
    _Column("BELL/S", 6, lambda one: short(one.rate.doorbells)),
    _Column("SLEEP", 5, lambda one: per_message(one.rate.sleeps_per_message)),
    _Column("SPIN", 5, lambda one: per_message(one.rate.spins_per_message)),
    _Column("WHY", 20, lambda one: _why(one.connection), number=False),
)
_LEAVE: Final = (
    "WHY",
    "SPIN",
    "SLEEP",
    "BELL/S",
    "B/S",
    "PID",
    "RING",
    "MSG/S",
    "STATE",
)  # columns to leave out on a narrow screen, in order


def ordered(view: View, sort: str, wanted: str, *, reverse: bool = False) -> list[Activity]:
    """The rows: those that hold `wanted` anywhere, in that order."""
    found = [one for one in view.activities if wanted.lower() in _searched(one.connection)]
    return sorted(found, key=SORTS[sort], reverse=reverse)


def head(view: View, path: str, width: int) -> list[str]:
    """The lines of totals, `HEAD_LINES` of them or more."""
    status, total = view.after.status, view.total
    states = ", ".join(f"{view.states[name]:,} {name}" for name in _STATES if view.states.get(name))
    reasons = ", ".join(f"{name} {count:,}" for name, count in sorted(view.reasons.items(), key=lambda one: -one[1]))
    counters = status["counters"]
    refused = ", ".join(
        f"{name.partition('{')[2][:-1]} {count:,}"
        for name, count in counters.items()
        if name.startswith("offer_refused")
    )
    sleeps, spins = per_message(total.sleeps_per_message) or "-", per_message(total.spins_per_message) or "-"
    up = f", up {_duration(status['uptime_s'])}, {counted(status['shims'], 'program')}"
    first = f"provider {status['pid']} at {path}{up}"
    lines = (
        first if len(first) <= width else f"provider {status['pid']}{up}",
        f"ends: {len(view.activities):,}{': ' if states else ''}{states}",
        f"{short(total.messages)} msg/s, {short(total.payload_len)}B/s, {percent(total.ring_share) or '-'} ring, "
        f"{short(total.doorbells)} bells/s; {sleeps} sleeps, {spins} spins a msg",
        f"offers: {counters.get('offer_accepted', 0):,}, {counters.get('claim_matched', 0):,} claimed"
        f"{f', refused: {refused}' if refused else ''}; memory: {short(status['budget_used_bytes'])}B of "
        f"{short(status['budget_bytes'])}B",
        f"why not: {reasons}" if reasons else "",
        *([summary(links)] if (links := view.after.links) else []),
        *_device_lines(view.devices),
    )
    return [cut(line, width) for line in lines]


def _device_lines(devices: Sequence[DeviceActivity]) -> list[str]:
    lines = [_device_line(one) for one in devices[:_DEVICES_MAX]]
    if more := devices[_DEVICES_MAX:]:
        lines[-1] += f"; {len(more)} more devices: --json has them"
    return lines


def _device_line(one: DeviceActivity) -> str:
    line = f"{one.device}: connections {one.objects.get('connections', 0):,}"
    for unit, words in _DEVICE_RATES.items():
        if any(name in one.rates for name in words):
            figures = ", ".join(f"{short(one.rates.get(name, 0.0))} {word}" for name, word in words.items())
            line += f"; {unit} a second: {figures}"
    return line


def headings(width: int) -> str:
    return _row(width, lambda column: column.heading)


def row(one: Activity, width: int) -> str:
    return _row(width, lambda column: column.cell(one))


def frame(view: View, rows: Iterable[Activity], path: str, width: int) -> list[str]:
    return [*head(view, path, width), headings(width), *(row(one, width) for one in rows)]


def rate_as_json(rate: Rate) -> dict[str, float | None]:
    return {
        "messages_per_s": round(rate.messages, 3),
        "bytes_per_s": round(rate.payload_len, 3),
        "ring_share": rate.ring_share,
        "doorbells_per_s": round(rate.doorbells, 3),
        "sleeps_per_message": rate.sleeps_per_message,
        "spins_per_message": rate.spins_per_message,
    }


def _row(width: int, cell: Callable[[_Column], str]) -> str:
    columns = _shown(width)
    cells = []
    for column in columns:
        room = column.width or _left(columns, width)
        text = cut(cell(column), room)
        cells.append(text.rjust(room) if column.number else text.ljust(room))
    return " ".join(cells)[:width].rstrip()


def _shown(width: int) -> list[_Column]:
    """The columns that leave enough room for the ends."""
    columns = list(_COLUMNS)
    for heading in _LEAVE:
        if _left(columns, width) >= _ENDS_MIN:
            break
        columns = [column for column in columns if column.heading != heading]
    return columns


def _left(columns: Sequence[_Column], width: int) -> int:
    return max(0, width - sum(column.width + 1 for column in columns) + 1)


def _ends(one: Connection) -> str:
    """Both ends; no host where it is the loopback address, and that of the remote end only where it is another."""
    (host, _, port), (other_host, _, other_port) = one.local.rpartition(":"), one.remote.rpartition(":")
    if port == "0":
        return "(not offered)"  # no program has needed its addresses yet
    shown = "" if host in _LOOPBACK else host
    return f"{shown}:{port} {one.arrow} {'' if other_host == host else other_host}:{other_port}"


def _why(one: Connection) -> str:
    """The reason that keeps it on TCP, or what carries it to another host."""
    return one.reason or (line(one.link) if one.link is not None else "")


def _searched(one: Connection) -> str:
    link = " ".join(str(one.link.get(name)) for name in ("protocol", "device", "peer")) if one.link is not None else ""
    return f"{one.who} {one.pid} {one.local} {one.remote} {one.state} {one.reason or ''} {link}".lower()


def _carried(one: Connection) -> int:
    return one.tx.ring_bytes + one.tx.tcp_bytes + one.rx.ring_bytes + one.rx.tcp_bytes


def _duration(seconds: float) -> str:
    minutes, hours, days = seconds // 60, seconds // 3600, seconds // 86400
    if days:
        return f"{days:.0f}d{hours % 24:.0f}h"
    if hours:
        return f"{hours:.0f}h{minutes % 60:.0f}m"
    return f"{minutes:.0f}m{seconds % 60:.0f}s" if minutes else f"{seconds:.0f}s"
