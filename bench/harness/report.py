"""The table. It is made from the JSON document alone, so that a saved run prints as a fresh one."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from sidestep.demo.picture import figure

NAMES = {"unpinned": "spread", "one-cpu": "1 CPU"}


def _spread(world: dict[str, Any] | None) -> str:
    if world is None:
        return "-"
    text = figure(world["median"])
    if len(world["values"]) > 1:
        text += f"\n{figure(world['min'])} .. {figure(world['max'])}"
    return text


def _times(world: dict[str, Any] | None) -> str:
    beside = world["beside"] if world else {}
    return " / ".join(figure(beside[key]) if key in beside else "-" for key in ("p50_us", "p99_us", "p999_us"))


def _bound(row: dict[str, Any], key: str) -> str:
    if not row["absolute"]:
        return f"{row[key]:g}x"
    bound = f"{figure(row[key])} {row['unit']}"
    return f"TCP\n+ {bound}" if row.get("over_tcp") else bound


def _ratio(found: dict[str, Any] | None) -> str:
    if not found or found.get("ratio") is None:
        return "-"
    return f"{found['ratio']:.2f}x\n{found['ratio_min']:.2f} .. {found['ratio_max']:.2f}"


def _limit(row: dict[str, Any]) -> str:
    found = row["worlds"].get("sidestep", {"beside": {}})["beside"].get("limit")
    return "-" if found is None else figure(found)


def _kept(row: dict[str, Any]) -> str:
    kept = row.get("work_kept")
    return "-" if kept is None else f"{kept:.1%}"


def _cells(row: dict[str, Any]) -> list[str]:
    best = row["worlds"].get(row["best_tcp"]) if row["best_tcp"] else None
    ours = row["worlds"].get("sidestep")
    where = f" ({NAMES[row['best_tcp']]})" if row["best_tcp"] and not row["absolute"] else ""
    times = "-"
    if any(world and "p50_us" in world["beside"] for world in (best, ours)):
        times = f"{_times(best)}\n{_times(ours)}"
    lowest = min((evidence.get("ring_share", 0.0) for evidence in row["promotion"]), default=None)
    return [
        f"{row['title']}\n{row['unit']}", _spread(best) + where, _spread(ours), _ratio(row), _ratio(row.get("peer")),
        times, _kept(row), _limit(row), "-" if lowest is None else f"{lowest:.1%}", _bound(row, "must"),
        _bound(row, "aim"), row["reached"],
    ]  # fmt: skip


def render(document: dict[str, Any], console: Console) -> None:
    """Prints the machine, the table, and what did not count with its reason."""
    machine, settings = document["machine"], document["settings"]
    console.print(machine["text"], markup=False, highlight=False)
    console.print(
        f"load before {' '.join(f'{load:.2f}' for load in document['load_before'])}, "
        f"after {' '.join(f'{load:.2f}' for load in document['load_after'])}; "
        f"{settings['rounds']} rounds of {settings['seconds']:g} s, alternating; promotion after "
        f"{settings['promote_after'] or 'the default'}",
        markup=False, highlight=False,
    )  # fmt: skip
    table = Table(show_lines=True)
    for heading, justify in (
        ("work", "left"), ("TCP, best placement\nmedian, min .. max", "right"), ("sidestep", "right"),
        ("ratio", "right"), ("sockmap's", "right"), ("p50/p99/p99.9 us\nTCP, sidestep", "right"),
        ("work beside\nkept", "right"), ("two\ncopies", "right"), ("by ring", "right"),
        ("must", "right"), ("aim", "right"), ("reached", "left"),
    ):  # fmt: skip
        table.add_column(heading, justify="left" if justify == "left" else "right", no_wrap=heading != "work")
    for row in document["rows"]:
        table.add_row(*_cells(row))
    console.print(table)
    for row in document["rows"]:
        for kind in ("failed", "invalid"):
            if row[kind]:
                console.print(f"{row['row']}: {kind.upper()}: {row[kind]}", markup=False, highlight=False)
        if why := (row.get("peer") or {}).get("failed"):
            console.print(f"{row['row']}: sockmap failed: {why}", markup=False, highlight=False)
    if why := document.get("peer", {}).get("missing"):
        console.print(f"sockmap: not run: {why}", markup=False, highlight=False)
    for skipped in document["skipped"]:
        console.print(f"{skipped['row']}: skipped: {skipped['why']}", markup=False, highlight=False)
