"""A channel that comes while another process has the connection: its answer is kept until that process has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import pytest
from common import standing_still
from hosts import Host, hosts, need_namespaces
from relay_example import relayed
from told_ends import End, promote

from sidestep.provider.control import ControlConnection
from sidestep.testing import Connection, Sidestep

pytestmark = pytest.mark.slow

ROUNDS: Final = 20
KEPT_MAX: Final = 16  # LATE_MAX in shim_late.c
DATA: Final = "bytes(range(256)) * 1000"
EXPIRY_S: Final = 600.0  # of offers: a provider that stood still for longer than usual answers none of them otherwise
ANSWERS: Final = ("its channel waits", "cannot attach", "attached as side")  # as the shim's log has them
REFUSED: Final = "refused: "


@pytest.fixture(params=["local", "relay"])
def stage(request: pytest.FixtureRequest) -> Iterator[Sidestep]:
    """A provider by which the two ends share a channel, or one that stands between them."""
    sidestep = Sidestep(offer_expiry_s=EXPIRY_S)
    with relayed(sidestep) if request.param == "relay" else sidestep:
        yield sidestep


@pytest.fixture
def local() -> Iterator[Sidestep]:
    with Sidestep(offer_expiry_s=EXPIRY_S) as sidestep:
        yield sidestep


def _ends(stage: Sidestep, logs: Path) -> tuple[End, End]:
    """Who connects, and offers late, and who accepts, and claims at once; each writes a log."""
    return (
        End(stage, logs / "a", SIDESTEP_PROMOTE_AFTER="20"),
        End(stage, logs / "b", SIDESTEP_PROMOTE_AFTER="1"),
    )


def _talk(a: End, b: End, name: str = "s") -> None:
    for one, other in ((a, b), (b, a)):
        one.ask(f"{name}.sendall(b'ping')")
        assert other.ask(f"get(4, {name!r})") == b"ping"


def _logged(log: Path, *what: str) -> int:
    """How often a program's log has one of these."""
    text = log.read_text(encoding="utf-8")
    return sum(text.count(each) for each in what or ANSWERS)


def _join(a: End, b: End, address: str = "127.0.0.1", names: Sequence[str] = ("s",)) -> None:
    for name in names:
        a.ask(f"globals().update({name}=socket.socket())")
        a.ask(f"connect({b.ask(f'serve({name!r}, {address!r})')}, {name!r}, {address!r})")
        b.ask(f"accept({name!r})")
        _talk(a, b, name)  # both meet the provider


def _claim(
    stage: Sidestep, a: End, b: End, logs: Path, then: Callable[[], object],
    *, offers: Sidestep | None = None, names: Sequence[str] = ("s",),
) -> None:  # fmt: skip
    """The accepting end claims them all while its provider stands still, which answers after `then` has been called.

    That end reads only while the provider stands still, so it never claims before. Another host's offer may still be on
    its way to this provider when that first stands still: then it goes on for a moment, and stands still again.
    """
    before, claimed, unread = _logged(logs / "b", "claimed"), 0, 0
    while not claimed:
        for name in names:
            a.ask(f"{name}.sendall(b'ping')")
        unread += 1
        if sum(c.state == "offered" and c.role == "active" for c in (offers or stage).connections()) < len(names):
            continue
        stage.connections()  # once more: the provider has taken the offers since
        with standing_still(stage.provider_pid):
            for name in names:
                assert b.ask(f"get(4, {name!r})") == b"ping"
            claimed = _logged(logs / "b", "claimed") - before
            if claimed == len(names):
                then()
        unread -= 1
    assert claimed == len(names)
    for name in names:
        assert b.ask(f"get({4 * unread}, {name!r})") == b"ping" * unread


def _keep(
    stage: Sidestep, a: End, b: End, logs: Path, who: str = "b", *, how: str = "idle()",
    address: str = "127.0.0.1", offers: Sidestep | None = None, names: Sequence[str] = ("s",),
) -> None:  # fmt: skip
    """Joins them. One makes a child while the provider has what it has asked, and takes the answers.

    No end claims while it has a child. So after a refusal the child ends, and all is done again.
    """
    _join(a, b, address, names)
    one, log = {"a": a, "b": b}[who], logs / who
    one.ask("__import__('sandbox') and None")
    while True:
        refused = _logged(log, REFUSED)
        _claim(stage, a, b, logs, partial(one.ask, f"__import__('sandbox').{how}"), offers=offers, names=names)
        while (answered := _logged(log)) < len(names) and _logged(log, REFUSED) == refused:
            for name in names:
                _talk(a, b, name)
        if answered == len(names):
            return
        assert one.ask("__import__('sandbox').end()") == 0


def _stays(stage: Sidestep, a: End, b: End, states: Sequence[str]) -> None:
    """They come to these states, and do not leave them."""

    def there(found: list[Connection]) -> bool:
        _talk(a, b)
        return sorted(c.state for c in found if c.role != "unknown") == states

    stage.wait_for(there)
    for _ in range(ROUNDS):
        assert there(stage.connections())


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
    a, b = _ends(stage, tmp_path)
    _keep(stage, a, b, tmp_path, who)
    _stays(stage, a, b, ["attached", "offered"])
    assert {"a": a, "b": b}[who].ask("__import__('sandbox').end()") == 0
    promote(stage, a, b)
    _exchange(a, b)
    b.ask("s.close()")
    assert a.ask("s.recv(1)") == b""


def test_it_is_taken_up_where_the_other_process_is_confined(stage: Sidestep, tmp_path: Path) -> None:
    """The channel is not used before the end of that process."""
    a, b = _ends(stage, tmp_path)
    _keep(stage, a, b, tmp_path, how="begin(s.fileno(), 0)")
    _stays(stage, a, b, ["attached", "pinned"])
    assert b.ask("__import__('sandbox').end()") == 0
    _promote(stage, a, b)
    _exchange(a, b)


@pytest.mark.parametrize("how", ["s.close()", "s.shutdown(socket.SHUT_WR)", "os._exit(0)", "os.kill(os.getpid(), 9)"])
def test_the_peer_ends_meanwhile(stage: Sidestep, tmp_path: Path, how: str) -> None:
    """All that it has sent is read, and the end."""
    a, b = _ends(stage, tmp_path)
    _keep(stage, a, b, tmp_path)
    a.ask(f"s.sendall({DATA})")
    a.tell(how)
    if "shutdown" in how:
        a.answer()
    assert b.ask("__import__('sandbox').end()") == 0
    taken_up = _logged(tmp_path / "b") + 1
    while _logged(tmp_path / "b") < taken_up and b.ask("queued()") > 1:
        b.ask("s.recv(1) and None")  # the channel is taken up in the midst
    assert b.ask(f"({DATA}).endswith(get(256000))")
    assert b.ask("s.recv(1)") == b""


def test_the_peer_is_asked_back_to_tcp_meanwhile(stage: Sidestep, tmp_path: Path) -> None:
    a, b = _ends(stage, tmp_path)
    _keep(stage, a, b, tmp_path)
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
    a, b = _ends(stage, tmp_path)
    _keep(stage, a, b, tmp_path)
    assert _segments(b) == 1
    b.ask(how)
    assert _segments(b) == 0
    assert b.ask("__import__('sandbox').end()") == 0
    b.ask("s.close()")
    assert a.ask("s.recv(1)") == b""


def test_a_later_child_has_nothing_of_it(local: Sidestep, tmp_path: Path) -> None:
    a, b = _ends(local, tmp_path)
    _keep(local, a, b, tmp_path)
    b.ask("__import__('sandbox').idle()")
    pids = b.ask("[pid for pid, _ in __import__('sandbox')._children]")
    assert [_segments(pid) for pid in (b.ask("os.getpid()"), *pids)] == [1, 0, 0]
    for _ in pids:
        assert b.ask("__import__('sandbox').end()") == 0
    promote(local, a, b)
    _exchange(a, b)


def test_one_more_than_there_is_room_for_stays_on_tcp(local: Sidestep, tmp_path: Path) -> None:
    a, b = _ends(local, tmp_path)
    names = ["s", *(f"s{number}" for number in range(KEPT_MAX))]
    _keep(local, a, b, tmp_path, names=names)
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
    a, b = _ends(stage, tmp_path)
    _keep(stage, a, b, tmp_path)
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


@contextmanager
def _two_hosts(logs: Path, expiry_s: float) -> Iterator[tuple[Host, Host, End, End]]:
    """Both, and the ends: the first connects to the other."""
    need_namespaces()
    with hosts(2, offer_expiry_s=expiry_s) as (here, there):
        with here.namespace.inside():
            a = End(here.sidestep, logs / "a", SIDESTEP_PROMOTE_AFTER="20")
        with there.namespace.inside():
            b = End(there.sidestep, logs / "b", SIDESTEP_PROMOTE_AFTER="1")
        yield here, there, a, b


def _links(host: Host) -> list[dict[str, object]]:
    """What its provider carries."""
    with ControlConnection(host.sidestep.socket) as connection:
        return list(connection.links())


def _promote_between(there: Host, a: End, b: End) -> None:
    def promoted(found: list[Connection]) -> bool:
        _talk(a, b)
        return any(c.promoted for c in found)

    there.sidestep.wait_for(promoted)
    _exchange(a, b)


@pytest.mark.parametrize("how", ["idle()", "begin(s.fileno(), 0)"])
def test_it_is_taken_up_between_hosts(tmp_path: Path, how: str) -> None:
    with _two_hosts(tmp_path, EXPIRY_S) as (here, there, a, b):
        _keep(there.sidestep, a, b, tmp_path, how=how, address=there.address, offers=here.sidestep)
        for _ in range(ROUNDS):
            _talk(a, b)
        assert b.ask("__import__('sandbox').end()") == 0
        _promote_between(there, a, b)
        b.ask("s.close()")
        assert a.ask("s.recv(1)") == b""


def test_its_link_ends_meanwhile(tmp_path: Path) -> None:
    """The offer expired before the claim. So the provider lets go of the channel, and another one is offered."""
    with _two_hosts(tmp_path, 1.0) as (here, there, a, b):
        _join(a, b, there.address)
        b.ask("__import__('sandbox') and None")

        def expire() -> None:
            b.ask("__import__('sandbox').idle()")
            here.wait_for(lambda: here.sidestep.status()["offers_pending"] == 0)

        _claim(there.sidestep, a, b, tmp_path, expire, offers=here.sidestep)
        while not _logged(tmp_path / "b", *ANSWERS, REFUSED):
            _talk(a, b)
        there.wait_for(lambda: not _links(there))
        assert b.ask("__import__('sandbox').end()") == 0
        _promote_between(there, a, b)
