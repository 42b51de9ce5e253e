"""A channel that comes while another process has the connection: its answer is kept until that process has ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import pytest
from common import standing_still
from hosts import hosts, need_namespaces
from relay_example import relayed
from told_ends import End, promote

from sidestep.testing import Connection, Sidestep

pytestmark = pytest.mark.slow

ROUNDS: Final = 20
KEPT_MAX: Final = 16  # LATE_MAX in shim_late.c
DATA: Final = "bytes(range(256)) * 1000"


@pytest.fixture(params=["local", "relay"])
def stage(request: pytest.FixtureRequest) -> Iterator[Sidestep]:
    """A provider by which the two ends share a channel, or one that stands between them."""
    sidestep = Sidestep()
    with relayed(sidestep) if request.param == "relay" else sidestep:
        yield sidestep


@pytest.fixture
def local() -> Iterator[Sidestep]:
    with Sidestep() as sidestep:
        yield sidestep


def _ends(stage: Sidestep, log: Path, who: str = "b") -> tuple[End, End]:
    """Who connects, and offers late, and who accepts, and claims at once; `who` writes the log."""
    return (
        End(stage, log if who == "a" else None, SIDESTEP_PROMOTE_AFTER="20"),
        End(stage, log if who == "b" else None, SIDESTEP_PROMOTE_AFTER="1"),
    )


def _talk(a: End, b: End, name: str = "s") -> None:
    for one, other in ((a, b), (b, a)):
        one.ask(f"{name}.sendall(b'ping')")
        assert other.ask(f"get(4, {name!r})") == b"ping"


def _logged(log: Path) -> int:
    """How many answers have come to the program that writes it."""
    text = log.read_text(encoding="utf-8")
    return sum(text.count(what) for what in ("its channel waits", "cannot attach", "attached as side"))


def _keep(
    stage: Sidestep, a: End, b: End, log: Path, who: str = "b", *, how: str = "idle()",
    address: str = "127.0.0.1", offers: Sidestep | None = None, names: Sequence[str] = ("s",),
) -> None:  # fmt: skip
    """Joins them. One makes a child while the provider has what it has asked, and takes the answers."""
    for name in names:
        a.ask(f"globals().update({name}=socket.socket())")
        a.ask(f"connect({b.ask(f'serve({name!r}, {address!r})')}, {name!r}, {address!r})")
        b.ask(f"accept({name!r})")
        a.ask(f"{name}.sendall(b'ping')")
    one = {"a": a, "b": b}[who]
    one.ask("__import__('sandbox') and None")
    while sum(c.state == "offered" and c.role == "active" for c in (offers or stage).connections()) < len(names):
        for name in names:
            assert b.ask(f"get(4, {name!r})") == b"ping"  # meanwhile this one meets the provider
            a.ask(f"{name}.sendall(b'ping')")
    stage.connections()  # once more: the provider has taken the offers since
    with standing_still(stage.provider_pid):
        for name in names:
            assert b.ask(f"get(4, {name!r})") == b"ping"
        one.ask(f"__import__('sandbox').{how}")
    while _logged(log) < len(names):
        for name in names:
            _talk(a, b, name)


def _exchange(a: End, b: End) -> None:
    for one, other in ((a, b), (b, a)):
        one.ask(f"s.sendall({DATA})")
        assert other.ask(f"get(256000) == {DATA}")


def _promote(stage: Sidestep, a: End, b: End) -> None:
    """As `promote`. A relay on one host goes back to TCP for good."""
    if "relay_opened" not in stage.status()["counters"]:
        promote(stage, a, b)


def _segments(who: End | int) -> int:
    """How many segments a process has open."""
    links = Path(f"/proc/{who if isinstance(who, int) else who.ask('os.getpid()')}/fd").iterdir()
    return sum("sidestep-channel" in str(link.readlink()) for link in links)


@pytest.mark.parametrize("who", ["a", "b"])
def test_it_is_taken_up_when_the_other_process_has_ended(stage: Sidestep, tmp_path: Path, who: str) -> None:
    """The peer has its side of the channel, and could not be offered another one."""
    a, b = _ends(stage, tmp_path / "log", who)
    _keep(stage, a, b, tmp_path / "log", who)
    for _ in range(ROUNDS):
        _talk(a, b)
    assert sorted(c.state for c in stage.connections() if c.role != "unknown") == ["attached", "offered"]
    assert {"a": a, "b": b}[who].ask("__import__('sandbox').end()") == 0
    promote(stage, a, b)
    _exchange(a, b)
    b.ask("s.close()")
    assert a.ask("s.recv(1)") == b""


def test_it_is_taken_up_where_the_other_process_is_confined(stage: Sidestep, tmp_path: Path) -> None:
    """The channel is not used before the end of that process."""
    a, b = _ends(stage, tmp_path / "log")
    _keep(stage, a, b, tmp_path / "log", how="begin(s.fileno(), 0)")
    for _ in range(ROUNDS):
        _talk(a, b)
    assert sorted(c.state for c in stage.connections() if c.role != "unknown") == ["attached", "pinned"]
    assert b.ask("__import__('sandbox').end()") == 0
    _promote(stage, a, b)
    _exchange(a, b)


@pytest.mark.parametrize("how", ["s.close()", "s.shutdown(socket.SHUT_WR)", "os._exit(0)", "os.kill(os.getpid(), 9)"])
def test_the_peer_ends_meanwhile(stage: Sidestep, tmp_path: Path, how: str) -> None:
    """All that it has sent is read, and the end."""
    a, b = _ends(stage, tmp_path / "log")
    _keep(stage, a, b, tmp_path / "log")
    a.ask(f"s.sendall({DATA})")
    a.tell(how)
    if "shutdown" in how:
        a.answer()
    assert b.ask("__import__('sandbox').end()") == 0
    taken_up = _logged(tmp_path / "log") + 1
    while _logged(tmp_path / "log") < taken_up and b.ask("queued()") > 1:
        b.ask("s.recv(1) and None")  # the channel is taken up in the midst
    assert b.ask(f"({DATA}).endswith(get(256000))")
    assert b.ask("s.recv(1)") == b""


def test_the_peer_is_asked_back_to_tcp_meanwhile(stage: Sidestep, tmp_path: Path) -> None:
    a, b = _ends(stage, tmp_path / "log")
    _keep(stage, a, b, tmp_path / "log")
    stage.demote(timeout_s=0)
    for _ in range(ROUNDS):
        _talk(a, b)
    assert b.ask("__import__('sandbox').end()") == 0
    for _ in range(5 * ROUNDS):
        _talk(a, b)
    assert not any(c.promoted for c in stage.connections())
    stage.promote(timeout_s=0)
    _promote(stage, a, b)
    _exchange(a, b)


@pytest.mark.parametrize("how", ["s.close()", "s.send(b'!', socket.MSG_OOB)"])
def test_nothing_is_left_of_it_when_its_connection_needs_it_no_more(stage: Sidestep, tmp_path: Path, how: str) -> None:
    a, b = _ends(stage, tmp_path / "log")
    _keep(stage, a, b, tmp_path / "log")
    assert _segments(b) == 1
    b.ask(how)
    assert _segments(b) == 0
    assert b.ask("__import__('sandbox').end()") == 0
    b.ask("s.close()")
    assert a.ask("s.recv(1)") == b""


def test_a_later_child_has_nothing_of_it(local: Sidestep, tmp_path: Path) -> None:
    a, b = _ends(local, tmp_path / "log")
    _keep(local, a, b, tmp_path / "log")
    b.ask("__import__('sandbox').idle()")
    pids = b.ask("[pid for pid, _ in __import__('sandbox')._children]")
    assert [_segments(pid) for pid in (b.ask("os.getpid()"), *pids)] == [1, 0, 0]
    for _ in pids:
        assert b.ask("__import__('sandbox').end()") == 0
    promote(local, a, b)
    _exchange(a, b)


def test_one_more_than_there_is_room_for_stays_on_tcp(local: Sidestep, tmp_path: Path) -> None:
    a, b = _ends(local, tmp_path / "log")
    names = ["s", *(f"s{number}" for number in range(KEPT_MAX))]
    _keep(local, a, b, tmp_path / "log", names=names)
    assert _segments(b) == KEPT_MAX
    assert b.ask("__import__('sandbox').end()") == 0

    def talk(found: list[Connection]) -> bool:
        for name in names:
            _talk(a, b, name)
        return sum(c.promoted for c in found) == 2 * KEPT_MAX

    local.wait_for(talk)
    for _ in range(ROUNDS):
        assert talk(local.connections())


def test_the_provider_is_another_one_meanwhile(stage: Sidestep, tmp_path: Path) -> None:
    """It need not know of a channel that the two ends share. One that stood between has taken its channels with it."""
    a, b = _ends(stage, tmp_path / "log")
    _keep(stage, a, b, tmp_path / "log")
    shared = "relay_opened" not in stage.status()["counters"]
    stage.kill_provider()
    stage.restart_provider()
    assert b.ask("__import__('sandbox').end()") == 0
    for _ in range(5 * ROUNDS):
        _talk(a, b)
    if shared:
        promote(stage, a, b)
    _exchange(a, b)
    b.ask("s.close()")
    assert a.ask("s.recv(1)") == b""
    assert _segments(b) == 0


@pytest.mark.least("full")  # once in a whole run no answer came between the hosts, and TCP went on: the cause is open
@pytest.mark.parametrize("how", ["idle()", "begin(s.fileno(), 0)"])
def test_it_is_taken_up_between_hosts(tmp_path: Path, how: str) -> None:
    need_namespaces()
    with hosts(2) as (here, there):
        with here.namespace.inside():
            a = End(here.sidestep, SIDESTEP_PROMOTE_AFTER="20")
        with there.namespace.inside():
            b = End(there.sidestep, tmp_path / "log", SIDESTEP_PROMOTE_AFTER="1")
        _keep(there.sidestep, a, b, tmp_path / "log", how=how, address=there.address, offers=here.sidestep)
        for _ in range(ROUNDS):
            _talk(a, b)
        assert b.ask("__import__('sandbox').end()") == 0

        def promoted(found: list[Connection]) -> bool:
            _talk(a, b)
            return any(c.promoted for c in found)

        there.sidestep.wait_for(promoted)
        _exchange(a, b)
        b.ask("s.close()")
        assert a.ask("s.recv(1)") == b""
