"""examples/prometheus: alerts that fire when they should, and queries of nothing but what `sidestep metrics` serves."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import needed
import pytest
from chatting import promoted_chat

from sidestep.native.layout import Refusal
from sidestep.observe.metrics import Exporter
from sidestep.testing import Sidestep

pytestmark = pytest.mark.slow  # real programs

PLACE = Path(__file__).parents[2] / "examples/prometheus"
DASHBOARD = json.loads((PLACE / "dashboard.json").read_text())
ALERTS = (PLACE / "alerts.yml").read_text()
NAME = re.compile(r"\bsidestep_\w+")


def promtool(*args: str | Path) -> None:
    found = subprocess.run([needed.program("promtool"), *args], cwd=PLACE, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


def queries() -> Iterator[str]:
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            yield target["expr"]


def test_prometheus_takes_the_files_and_the_alerts_fire() -> None:
    promtool("check", "config", "prometheus.yml")
    promtool("test", "rules", "alerts_test.yml")


def test_every_query_of_the_dashboard_is_one(tmp_path: Path) -> None:
    expressions = [query.replace("$__rate_interval", "5m").replace("$instance", ".*") for query in queries()]
    assert not any("$" in one for one in expressions)
    rules = [{"record": f"query:{number}", "expr": one} for number, one in enumerate(expressions)]
    file = tmp_path / "rules.yml"
    file.write_text(json.dumps({"groups": [{"name": "queries", "rules": rules}]}))
    promtool("check", "rules", file)


def test_the_queries_name_only_what_is_served(sidestep: Sidestep, closing: ExitStack) -> None:
    promoted_chat(sidestep, closing)
    text = Exporter(sidestep.socket).text().decode()
    served = set(re.findall(r"(?m)^# TYPE (\w+) ", text))
    asked = "\n".join([*queries(), DASHBOARD["templating"]["list"][1]["query"], *re.findall(r"(?m)^ .*", ALERTS)])
    assert set(NAME.findall(asked)) - served == set()
    labels = {found[1]: set(re.findall(r'(\w+)="', found[2])) for found in re.finditer(r"(?m)^(\w+)\{(.*)\} ", text)}
    matched = [
        (found[1], set(re.findall(r"(\w+)[=!]", found[2]))) for found in re.finditer(r"(sidestep_\w+)\{(.*?)\}", asked)
    ]
    assert [one for one in matched if one[0] in labels and one[1] - labels[one[0]] - {"instance"}] == []


def test_the_refusals_that_alerts_name_exist() -> None:
    (named,) = re.findall(r'offer_refused_total\{reason=~"(.*?)"\}', ALERTS)
    assert set(named.split("|")) <= {one.name for one in Refusal}


def test_panels_do_not_overlap() -> None:
    taken = [
        (column, line)
        for place in (panel["gridPos"] for panel in DASHBOARD["panels"])
        for column in range(place["x"], place["x"] + place["w"])
        for line in range(place["y"], place["y"] + place["h"])
    ]
    assert len(taken) == len(set(taken))
    assert max(column for column, _ in taken) < 24
