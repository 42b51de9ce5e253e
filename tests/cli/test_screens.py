"""What `ss` and `explain` print at the widths of terminals, into a pipe, and of many connections."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from click.testing import CliRunner
from common import slot
from shim_client import ShimClient

from sidestep.cli.explain import _grouped
from sidestep.cli.group import cli
from sidestep.cli.ss_table import COLUMNS, _Screen
from sidestep.native.layout import REASON_TEXT, Reason, State
from sidestep.observe.connections import Connection, connections
from sidestep.observe.explain import Explanation, Verdict
from sidestep.testing import Sidestep

BUSY = {
    "tx_ring_bytes": 123_456_789, "tx_ring_msgs": 98_765, "tx_tcp_bytes": 12_345, "tx_tcp_msgs": 67,
    "rx_ring_msgs": 987, "rx_ring_bytes": 98_765_432, "doorbells_sent": 1234, "sleeps": 56, "spins_won": 7,
}  # fmt: skip
IPV6 = {"family": 10, "local_addr": bytes.fromhex("20010db8" + "1234" * 6)}


@pytest.fixture
def shown(sidestep: Sidestep) -> Iterator[list[Connection]]:
    """Four kinds of connections, one of a container with a long name."""
    with ShimClient(sidestep.socket, slots_max=128) as client:
        client.hello()
        client.write_arena([
            slot(1000, **BUSY),
            slot(2000, state=State.PINNED, reason=Reason.EPOLL_UNSUPPORTED, **BUSY),
            slot(3000, state=State.NATIVE, reason=Reason.YOUNG),
            slot(45678, **BUSY, **IPV6),
        ])  # fmt: skip
        found = list(connections(sidestep.socket))
        yield [*found, found[0]._replace(program="a-program-of-15", container="0123456789ab")]


@pytest.mark.parametrize("width", [80, 100, 200])
def test_ss_breaks_no_word_at_any_width(shown: list[Connection], width: int) -> None:
    lines = list(_Screen(width, coloured=False).lines(shown, with_head=True))
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    head = lines[0].split()
    for one in shown:
        assert one.local in text
        assert f"-> {one.remote}" in text
    assert {"PROGRAM", "CONNECTION", "STATE"} <= set(head) <= {*COLUMNS, "CONNECTION"}
    for reason in (Reason.EPOLL_UNSUPPORTED, Reason.YOUNG):
        words = REASON_TEXT[reason].split()
        assert set(words) <= set(text.split())
    assert ("SPINS" in head) == (width >= 200)


def test_a_sentence_stands_below_its_connection_where_there_is_no_room_beside(shown: list[Connection]) -> None:
    lines = list(_Screen(80, coloured=False).lines([shown[1]], with_head=True))
    assert lines[0].split()[-1] != "WHY"
    assert lines[3:] == ["    the epoll set is shared or unknown, or holds a closed descriptor"]
    (wide,) = (line for line in _Screen(200, coloured=False).lines([shown[1]], with_head=True) if "unknown" in line)
    assert wide.index("the epoll set") > 60


def test_later_pieces_stand_below_the_headings_of_the_first(shown: list[Connection]) -> None:
    screen = _Screen(100, coloured=False)
    head, *_ = screen.lines(shown, with_head=True)
    lines = list(screen.lines(shown, with_head=False))
    assert lines[0].index("promoted") == head.index("STATE")


def test_ss_in_a_pipe_has_a_line_for_each(shown: list[Connection], sidestep: Sidestep) -> None:
    result = CliRunner().invoke(cli, ["ss", f"--socket={sidestep.socket}"])
    head, *lines = result.stdout.splitlines()
    assert head.split() == [*COLUMNS]
    assert len(lines) == 4
    assert lines[1].endswith(REASON_TEXT[Reason.EPOLL_UNSUPPORTED])


def test_ss_sums_up(sidestep: Sidestep) -> None:
    with ShimClient(sidestep.socket, slots_max=128) as client:
        client.hello()
        pinned = slot(7, state=State.PINNED, reason=Reason.EPOLL_UNSUPPORTED)
        client.write_arena([*(slot(1000 + number) for number in range(50)), pinned])
        words = ["ss", "--summary", f"--socket={sidestep.socket}"]
        lines = CliRunner().invoke(cli, words).stdout.splitlines()
        assert lines[0] == "51 ends of connections: 50 promoted, 1 pinned"
        assert lines[1].split() == ["ENDS", "PROGRAM", "STATE", "WHY"]
        assert [line.split()[0] for line in lines[2:]] == ["50", "1"]
        assert lines[3].endswith(REASON_TEXT[Reason.EPOLL_UNSUPPORTED])
        assert CliRunner().invoke(cli, [*words, "--port=3"]).stdout == "0 ends of connections\n"
        assert CliRunner().invoke(cli, [*words, "--json"]).exit_code == 2


def test_explain_sums_up_and_shows_equal_explanations_once(sidestep: Sidestep) -> None:
    """Both ends of 50 connections, one of which is pinned at one end."""
    with ShimClient(sidestep.socket, slots_max=128) as client:
        client.hello()
        slots = []
        for number in range(50):
            same = {"segment_id": number.to_bytes(16, "big")}
            slots += [
                slot(2000 + number, remote_port=6000, **same),
                slot(
                    6000, role=2, remote_port=2000 + number, **same,
                    local_addr=bytes(10) + b"\xff\xff\x7f\0\0\2", remote_addr=bytes(10) + b"\xff\xff\x7f\0\0\1",
                ),
            ]  # fmt: skip
        slots[1] |= {"state": State.PINNED, "reason": Reason.URGENT_DATA}
        slots[0] |= {"state": State.PINNED, "reason": Reason.PEER_LEFT}
        client.write_arena(slots)
        words = ["explain", ":6000", f"--socket={sidestep.socket}"]
        text = CliRunner().invoke(cli, words).stdout
        paragraphs = text.split("\n\n")
        assert paragraphs[0] == "50 connections, 49 promoted, 1 on TCP"
        assert len(paragraphs) == 1 + 3
        assert len(text.splitlines()) < 30
        assert text.count("97 more, 388 system calls saved; --all shows each") == 1
        whole = CliRunner().invoke(cli, [*words, "--all"]).stdout
        assert whole.startswith(f"{paragraphs[0]}\n\n")
        assert len(whole.split("\n\n")) == 1 + 100
        assert len(json.loads(CliRunner().invoke(cli, [*words, "--json"]).stdout)["explanations"]) == 100
        one = CliRunner().invoke(cli, ["explain", "127.0.0.1:2001", f"--socket={sidestep.socket}"]).stdout
        assert one.startswith("1 connection, 1 promoted\n\n")


def test_explain_groups_ends_whose_program_is_not_seen() -> None:
    """Each of a server's connections, where another user runs the server."""
    ends = [
        Explanation(
            f"127.0.0.1:6379 -- 127.0.0.1:{port},",
            Verdict.TCP,
            "tcp",
            "OTHER_USER",
            "its process runs as redis",
            "",
            (),
            0,
            None,
        )
        for port in range(2000, 2050)
    ]
    (text,) = _grouped(ends)
    assert "49 more; --all shows each" in text


SCREEN_80 = """
PROGRAM       CONNECTION                                      STATE
redis-server  127.0.0.1:1000                                  promoted
              -> 127.0.0.2:80
redis-server  127.0.0.1:2000                                  pinned
              -> 127.0.0.2:80
    the epoll set is shared or unknown, or holds a closed descriptor
redis-server  127.0.0.1:3000                                  native
              -> 127.0.0.2:80
    the connection has not exchanged enough to be worth a channel, or the other
    end has offered none
redis-server  [2001:db8:1234:1234:1234:1234:1234:1234]:45678  promoted
              -> [::ffff:127.0.0.2]:80
"""


def test_the_screen_of_a_terminal_is_as_kept(shown: list[Connection]) -> None:
    kept = [one._replace(program="redis-server", pid=4711, container=None) for one in shown[:4]]
    lines = _Screen(80, coloured=False).lines(kept, with_head=True)
    assert [line.rstrip() for line in lines] == SCREEN_80.strip("\n").splitlines()
