"""iperf3: one way, the other way, both, and parallel streams; its own byte counts agree."""

from __future__ import annotations

import json

import needed
import pytest
from stage import Stage


@pytest.mark.parametrize(
    ("options", "streams"), [((), 1), (("-R",), 1), (("-P", "4"), 4)], ids=["forward", "reverse", "parallel"]
)
def test_throughput(stage: Stage, options: tuple[str, ...], streams: int) -> None:
    """The run succeeds, and the receiver got what the sender sent but for what the end of the test cut off."""
    iperf3 = needed.program("iperf3")
    server, port = stage.serve(lambda port: [iperf3, "-s", "-1", "-B", "127.0.0.1", "-p", str(port)])
    with stage.watching(port, streams):  # the control connection is idle meanwhile and may go either way
        report = json.loads(
            stage.run("client", [iperf3, "-c", "127.0.0.1", "-p", str(port), "-t", "1", "-J", *options])
        )
    assert "error" not in report, report["error"]
    assert len(report["end"]["streams"]) == streams
    sent, received = report["end"]["sum_sent"]["bytes"], report["end"]["sum_received"]["bytes"]
    assert 0 < received <= sent
    server.expect_exit()
