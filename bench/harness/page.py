"""Tables and plots of the documents, made from a saved run alone; the text around them is written by hand.

A document marks what is made by `<!-- figures: NAME -->` and `<!-- end of figures -->`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from harness.model import PEER
from sidestep.demo.picture import Bar, Group, draw, figure, slower, times

SAVED: Final = Path("docs/guides/performance.json")
DOCUMENTS: Final = (Path("docs/guides/performance.md"), Path("README.md"))
README_ROWS: Final = ("redis-1", "redis-50", "nginx", "pgbench-1", "pingpong", "asyncio", "stream-64k", "short")
GAIN: Final = 1.05  # from here on a ratio is a gain; below it a row is about as fast as TCP, or slower
BUSY_LOAD: Final = 0.5  # for each CPU, before the first row: figures taken so are not to be trusted
PLOTS: Final = {
    "gain": "Faster than kernel TCP",
    "even": "As fast as kernel TCP, or slower",
    "load": "Beside programs that use all CPUs",
}
NO_ROW: Final = "No row of this run is of this kind."
_BESIDE: Final = re.compile(r", beside \d+ busy programs")
_BLOCK: Final = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end of figures -->)", re.S)

Row = Mapping[str, Any]


def merged(documents: list[dict[str, Any]]) -> dict[str, Any]:
    """One document: the first, with the rows that later ones measured again."""
    first, *others = documents
    rows = {row["row"]: row for document in documents for row in document["rows"]}
    for other in others:
        if other["machine"]["text"] != first["machine"]["text"]:
            raise ValueError(f"runs of two machines: {first['machine']['text']} and {other['machine']['text']}")
    skipped = [one for one in first["skipped"] if one["row"] not in rows]
    return first | {"rows": list(rows.values()), "skipped": skipped}


def files(document: dict[str, Any], root: Path) -> dict[Path, str]:
    """What each file below `root` is to hold: the documents with new tables, and the plots."""
    groups = _groups(document)
    made = {SAVED.with_name(f"performance-{name}.svg"): _plot(document, name, groups[name]) for name in PLOTS}
    blocks = _blocks(document, groups)
    for path in DOCUMENTS:
        text = (root / path).read_text(encoding="utf-8")
        made[path] = _BLOCK.sub(lambda found: f"{found[1]}{blocks[found[2]]}\n{found[3]}", text)
    return made


def _groups(document: dict[str, Any]) -> dict[str, list[Row]]:
    """The rows that count, by where they are shown."""
    groups: dict[str, list[Row]] = {"gain": [], "even": [], "load": [], "cost": []}
    for row in document["rows"]:
        if row["invalid"] or row["failed"] or "sidestep" not in row["worlds"]:
            continue
        if row["absolute"] or row["row"].startswith("cpu-"):
            groups["cost"].append(row)
        elif "-load" in row["row"]:
            groups["load"].append(row)
        else:
            groups["gain" if row["ratio"] >= GAIN else "even"].append(row)
    return groups


def _blocks(document: dict[str, Any], groups: Mapping[str, list[Row]]) -> dict[str, str]:
    counted = {row["row"]: row for name in PLOTS for row in groups[name]}
    blocks = {name: _compared(name, groups[name]) for name in ("gain", "even")}
    blocks["load"] = _crowded(groups["load"])
    blocks["cost"] = _cost(groups["cost"])
    tails = (_tail_cells(row) for name in ("gain", "even") for row in groups[name] if row["unit"] == "us")
    blocks["tails"] = _table("work", "TCP", "sidestep", rows=filter(None, tails))
    readme = ([*_figures(counted[name]), _ratio(counted[name])] for name in README_ROWS if name in counted)
    blocks["readme"] = _table("work", "kernel TCP", "sidestep", "ratio", rows=readme)
    blocks["machine"] = "\n".join(_about(document))
    return blocks


def _compared(name: str, rows: list[Row]) -> str:
    if not rows:
        return NO_ROW
    columns: list[tuple[str, Callable[[Row], str]]] = [("ratio", _ratio_and_spread)]
    if any(row.get("peer") for row in rows):
        columns.append((PEER, _peer))
    columns.append(("must/aim", _must))
    cells = ([*_figures(row), *(cell(row) for _, cell in columns)] for row in rows)
    table = _table("work", "TCP", "sidestep", *(title for title, _ in columns), rows=cells)
    limits = [f"{row['title']} {limit}" for row in rows if (limit := _limit(row))]
    alone = f"Two copies alone: {', '.join(limits)}.\n\n" if limits else ""
    return f"{table}\n\n{alone}{_picture(name)}"


def _crowded(rows: list[Row]) -> str:
    """A line for each work, with the ratios beside few and beside many busy programs."""
    if not rows:
        return NO_ROW
    works: dict[str, dict[int, Row]] = {}
    for row in rows:
        title, load = _BESIDE.sub("", row["title"]), int(row["row"].rpartition("load")[2])
        works.setdefault(title, {})[load] = row
    loads = sorted({load for found in works.values() for load in found})
    lines = []
    for title, found in works.items():
        here = [found.get(load) for load in loads]
        ratios = ["-" if row is None else _ratio_and_spread(row) for row in here]
        beside = (["-" if row is None else cell(row).split(" (")[0] for row in here] for cell in (_peer, _work_kept))
        short = ("/".join(cells) if set(cells) != {"-"} else "-" for cells in beside)
        lines.append([title, *ratios, *short, _must(next(iter(found.values())))])
    heads = ["work", *(f"{load} busy" for load in loads), PEER, "work kept beside", "must/aim"]
    return f"{_table(*heads, rows=lines)}\n\n{_picture('load')}"


def _picture(name: str) -> str:
    return f"![{PLOTS[name]}: bars for each row of the table](performance-{name}.svg)"


def _must(row: Row) -> str:
    return f"{row['must']:g}x/{row['aim']:g}x"


def _ratio(row: Row) -> str:
    return f"**{times(row['ratio'])}**"


def _ratio_and_spread(row: Row) -> str:
    return f"{_ratio(row)} ({row['ratio_min']:.2f}..{row['ratio_max']:.2f})"


def _peer(row: Row) -> str:
    """The peer's ratio to TCP and its spread."""
    found = row.get("peer")
    if not found:
        return "-"
    if "failed" in found:
        return "failed"
    return f"{times(found['ratio'])} ({found['ratio_min']:.2f}..{found['ratio_max']:.2f})"


def _limit(row: Row) -> str:
    """Two copies on two CPUs and nothing else, by TCP."""
    found = row["worlds"]["sidestep"]["beside"].get("limit")
    return "" if found is None else times(found / _tcp(row)["median"])


def _work_kept(row: Row) -> str:
    kept = row.get("work_kept")
    return "-" if kept is None else f"{kept:.1%}"


def _figures(row: Row) -> list[str]:
    medians = (world["median"] for world in (_tcp(row), row["worlds"]["sidestep"]))
    return [f"{row['title']}, {row['unit']}", *map(figure, medians)]


def _cost(rows: list[Row]) -> str:
    """The costs: less is better, and the last column has the most that is allowed."""

    def peers(row: Row) -> str:
        if "failed" in (row.get("peer") or {}):
            return "failed"
        return figure(row["worlds"][PEER]["median"]) if PEER in row["worlds"] else "-"

    def at_most(row: Row) -> str:
        if row["absolute"]:
            return ("TCP + " if row.get("over_tcp") else "") + figure(row["must"])
        return "TCP" if row["must"] == 1 else f"TCP / {row['must']:g}"

    columns = [(PEER, peers)] if any(PEER in row["worlds"] for row in rows) else []
    columns.append(("at most", at_most))
    cells = ([*_figures(row), *(cell(row) for _, cell in columns)] for row in rows)
    return _table("work", "TCP", "sidestep", *(title for title, _ in columns), rows=cells)


def _tail_cells(row: Row) -> list[str] | None:
    worlds = [world["beside"] for world in (_tcp(row), row["worlds"]["sidestep"])]
    keys = ("p50_us", "p99_us", "p999_us")
    if not all(key in world for world in worlds for key in keys):
        return None
    return [
        row["title"].removesuffix(", p50"), *("/".join(figure(world[key]) for key in keys) for world in worlds),
    ]  # fmt: skip


def _tcp(row: Row) -> dict[str, Any]:
    found: dict[str, Any] = row["worlds"][row["best_tcp"]]
    return found


def _about(document: dict[str, Any]) -> Iterable[str]:
    """Machine and method, and what stands against the figures."""
    machine, settings = document["machine"], document["settings"]
    yield f"Machine: {machine['text']}."
    yield f"{settings['rounds']} rounds of {settings['seconds']:g} s, in turns; {_load(document)}."
    if settings["quick"]:
        yield "**Short rounds: a look, and no figures to keep.**"
    if document["load_before"] and document["load_before"][0] > BUSY_LOAD * machine["cpus"]:
        yield "**The machine was busy when they began: no figures to trust.**"
    for row in document["rows"]:
        if why := row["failed"] or row["invalid"]:
            yield f"\nNot counted: {row['title']}: {why}."
        elif why := (row.get("peer") or {}).get("failed"):
            yield f"\nNot counted for {PEER}: {row['title']}: {why}."
    for skipped in document["skipped"]:
        yield f"\nNot measured: {skipped['row']}: {skipped['why']}."
    if why := document.get("peer", {"missing": "it was not part of this run"})["missing"]:
        yield f"\nNo {PEER} beside them: {why}."


def _load(document: dict[str, Any]) -> str:
    loads = document["load_before"], document["load_after"]
    if None in loads:
        return "the load was not recorded"
    before, after = (" ".join(f"{load:.2f}" for load in found) for found in loads)
    return f"load before: {before}, after: {after}"


def _plot(document: dict[str, Any], name: str, rows: list[Row]) -> str:
    groups = []
    for row in rows:
        kind = "slower" if slower(row["ratio"]) else "ours"
        ours = Bar("sidestep", row["worlds"]["sidestep"]["median"], kind, times(row["ratio"]))
        bars = [Bar("kernel TCP", _tcp(row)["median"], "tcp"), ours]
        if PEER in row["worlds"] and "failed" not in row["peer"]:
            bars.append(Bar(PEER, row["worlds"][PEER]["median"], "tcp", times(row["peer"]["ratio"])))
        groups.append(Group(row["title"], row["unit"], bars, row["lower_is_better"]))
    notes = [line.strip("*\n") for line in _about(document)]
    return draw(PLOTS[name], groups, notes=notes)


def _table(*columns: str, rows: Iterable[list[str]]) -> str:
    """A table in Markdown: words to the left, figures to the right."""
    lines = [list(columns), ["---", *(["---:"] * 2), *(["---"] * (len(columns) - 3))]]
    lines += ([cell.replace("|", "\\|") for cell in row[: len(columns)]] for row in rows)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
