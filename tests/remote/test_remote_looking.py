"""What commands and metrics show of a connection with another host is what its providers have."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest
from hosts import ENGINE, NETWORK, Host, Make, command
from prometheus_client.parser import text_string_to_metric_families
from talking import PORT, TALKERS, line, promoted, serving

from sidestep import limits
from sidestep.observe.device_totals import DeviceTotals, activities
from sidestep.observe.links import OTHERS, LinkRoute, LinkTotals, sums
from sidestep.observe.metrics import Exporter
from sidestep.observe.rdma import DeviceView, ProcessView
from sidestep.settings import RemoteSettings

SIZE = 300_000
NUMBERS = {
    "sent", "arrived", "held", "window", "credit", "remote_credit", "receives_posted", "adverts", "remote_adverts",
    "read_zcopy_sent", "write_zcopy_sent", "read_zcopy_received", "write_zcopy_received",
}  # fmt: skip
WORDS = {"protocol", "device", "peer", "state", "send_mechanism", "receive_mechanism", "send_mode", "receive_mode"}


def values(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """The samples of a scrape, by name."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


@pytest.mark.slow
def test_commands_and_metrics_show_the_link(two: tuple[Host, Host]) -> None:
    one, other = two
    serving(other)
    argv = [*TALKERS, "tell", other.address, str(PORT), str(SIZE), str(SIZE)]
    with one.popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
        assert line(client) == "talks"
        promoted(one, other)
        exporters = {host.number: Exporter(host.sidestep.socket) for host in two}
        for host, peer in (two, reversed(two)):
            host.sidestep.wait_for(
                lambda found: [each.link.get("engine", False) for each in found if each.link] == [ENGINE]
            )
            link = shown(host)
            assert {name for name in NUMBERS if isinstance(link[name], int)} == NUMBERS
            assert {name for name in WORDS if isinstance(link[name], str) and link[name]} == WORDS
            assert (link["protocol"], link["peer"]) == ("sdp", peer.address)
            assert link["device"] == f"iwarp@{host.address}"
            assert 0 < link["receives_posted"] <= limits.REMOTE_RECEIVES
            assert 0 < link["credit"] <= limits.REMOTE_RECEIVES

            explained = command(host, "explain", f":{PORT}")
            assert f"over {link['device']} to {peer.address}" in explained
            assert "receives posted" in explained
            assert "by Read Zcopy" in explained
            top = command(host, "top", "--once", "--interval=0.1")
            assert f"links: 1 to 1 host, {int(ENGINE)} by the engine, {link['send_mechanism']}" in top
            assert ("the engine" in explained) == ENGINE
            scraped = values(exporters[host.number].text().decode())
            way = {"protocol": "sdp", "device": link["device"], "peer": peer.address}
            assert scraped["sidestep_links"] == [(way, 1)]
            assert scraped["sidestep_links_by_engine"] == [(way, int(ENGINE))]
            assert any(count > 0 for _, count in scraped.get("sidestep_engine_lent_total", [])) == ENGINE
            assert scraped["sidestep_link_receives_posted"][0][1] > 0
            assert sum(count for _, count in scraped["sidestep_link_modes"]) == 2
            sent = [count for labels, count in scraped["sidestep_link_bytes_total"] if labels["direction"] == "sent"]
            assert sent[0] >= link["sent"] > 0
        client.communicate("go\n", timeout=60)
    for host in two:  # it is over, and what was counted stays
        host.sidestep.wait_for(lambda found: not any(each.link for each in found))
        scraped = values(exporters[host.number].text().decode())
        assert scraped.get("sidestep_links", []) == []
        assert [count > 0 for _, count in scraped["sidestep_link_bytes_total"]] == [True, True]


@pytest.mark.slow
def test_commands_and_metrics_show_the_queue_pairs_of_roce(make_hosts: Make) -> None:
    one, other = make_hosts(2, remote=RemoteSettings.parse(NETWORK, transports="roce"))
    serving(other)
    argv = [*TALKERS, "tell", other.address, str(PORT), str(SIZE), str(SIZE)]
    with (
        one.losing("udp dport 4791 numgen random mod 20 0"),
        one.popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client,
    ):
        assert line(client) == "talks"
        promoted(one, other)
        exporters = {host.number: Exporter(host.sidestep.socket) for host in (one, other)}
        found = [shown(host)["queue_pair"] for host in (one, other)]
        assert [each["remote_number"] for each in found] == [each["number"] for each in reversed(found)]
        for host, each in zip((one, other), found, strict=True):
            assert each["mtu"] in (256, 512, 1024, 2048, 4096)
            explained = command(host, "explain", f":{PORT}")
            assert f"{each['number']}, there {each['remote_number']}; path MTU {each['mtu']}" in explained
            assert "times of going back" in explained
            assert f"queue pair {each['number']} to {each['remote_number']}" in command(host, "ss")
            listed = json.loads(subprocess.check_output([sys.executable, "-m", "sidestep", "rdma", "list", "--json"]))
            of_host = [one for one in listed["processes"] if one["pid"] == shown(host)["process"]]
            (device,) = [one for process in of_host for one in process["devices"] if "roce@" in one["name"]]
            assert device["name"] == f"roce@{host.address}"
            assert each["number"] in [qp["number"] for qp in device["queue_pairs"]]
            assert device["counters"]["packets_sent"] > 0
            scraped = values(exporters[host.number].text().decode())
            way = {"protocol": "sdp", "device": device["name"]}
            packets = [labels for labels, count in scraped["sidestep_link_packets_total"] if count > 0]
            assert [labels["direction"] for labels in packets] == ["received", "sent"]
            assert all(way.items() <= labels.items() for labels in packets)
            events = {
                (labels["event"], labels["reason"]): count
                for labels, count in scraped["sidestep_device_events_total"]
                if labels["device"] == device["name"]
            }
            assert events["packets_sent", ""] >= each["packets_sent"]
            objects = {labels["kind"]: count for labels, count in scraped["sidestep_device_objects"]}
            assert objects["queue_pairs"] >= 1
            assert f"{device['name']}: " in (top := command(host, "top", "--once", "--interval=0.1"))
            assert re.search(r"connections \d+; packets a second: \S+ sent, \S+ received, \S+ resent, \S+ dropped", top)
            (now,) = [
                one
                for one in json.loads(command(host, "top", "--json", "--interval=0.1"))["devices"]
                if one["device"] == device["name"]
            ]
            assert now["objects"]["queue_pairs"] >= 1
            assert now["rates"].keys() >= {"packets_sent", "packets_received"}
        client.communicate("go\n", timeout=60)
    scraped = values(exporters[one.number].text().decode())
    assert sum(count for _, count in scraped["sidestep_link_packets_total"]) > 50


def test_a_worker_that_ends_takes_no_counts_away() -> None:
    totals = DeviceTotals()
    for pid, sent in ((1, 5), (1, 7), (2, 3), (2, 4)):
        counters = {"packets_sent": sent, "nak_sent{sequence}": 1, "queue_pairs": 2}
        totals.handle([ProcessView(pid, 0, "p", [DeviceView("d", "a", [], counters)])])
    assert totals.counts == {("d", "packets_sent", ""): 11, ("d", "nak_sent", "sequence"): 2}
    assert totals.present == {("d", "queue_pairs"): 2}


def test_what_goes_on_on_devices() -> None:
    def look(pid: int, **counters: int) -> ProcessView:
        return ProcessView(pid, 0, "p", [DeviceView("d", "a", [], {"queue_pairs": 2, "drop{a}": 5} | counters)])

    before = [look(1, packets_sent=100), look(2, packets_sent=7)]
    after = [
        look(1, packets_sent=120, **{"drop{a}": 6, "drop{b}": 2}),
        look(2, packets_sent=9),
        look(3, packets_sent=50),
    ]
    (found,) = activities(before, after, 2.0)
    assert found.objects == {"queue_pairs": 6}
    assert found.rates == {"packets_sent": 11.0, "drop": 1.5}  # the third one is new: nobody knows since when it counts


def shown(host: Host) -> dict[str, Any]:
    found = json.loads(command(host, "ss", "--json"))["connections"]
    link: dict[str, Any]
    (link,) = [one["link"] for one in found if one["link"] is not None]
    return link


def test_more_hosts_than_series_are_one() -> None:
    totals = LinkTotals()
    links: list[dict[str, Any]] = [
        {"segment": str(number), "protocol": "sdp", "device": "d", "peer": f"h{number}", "sent": 5, "credit": 2}
        for number in range(limits.LINK_PEERS_MAX + 3)
    ]
    for _ in range(2):  # nothing has grown the second time
        totals.handle(links)
    sent = {way.peer: count for (way, unit, to, _), count in totals.counts.items() if (unit, to) == ("bytes", "sent")}
    assert len(sent) == limits.LINK_PEERS_MAX + 1
    assert (sent["h0"], sent[OTHERS]) == (5, 15)
    assert sums(links, totals.named)[LinkRoute("sdp", "d", OTHERS)].credit == 6


def test_a_segment_that_begins_anew_is_counted_from_its_start() -> None:
    totals = LinkTotals()
    for sent in (100, 40):
        totals.handle([{"segment": "a", "sent": sent}])
    assert totals.counts[LinkRoute("", "", ""), "bytes", "sent", ""] == 140
