"""Two hosts whose providers promote over the kernel's rxe, as the transport `verbs`; and what happens as it goes.

One host is a guest. The other one is this machine with the software HCA, which speaks the same wire, or a second guest.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import pytest
from lab_guest import ROOT, Lab, Unusable

from sidestep import gain
from sidestep.native.layout import Reason

_NETWORK: Final = "198.18.2.0/24"
_CONTROL: Final = 7171
_ANSWER_S: Final = 100.0  # an emulated processor, on a machine that others use
_LOOK_S: Final = 1.0
_LARGE: Final = 30_000  # bytes, of which no part is copied on its way to the device
_REST_S: Final = 2.5
_PROGRAM: Final = ROOT / "tests" / "interop" / "guest" / "verbs_host.py"


class Peer:
    """A host; see `guest/verbs_host.py` for what it does."""

    def __init__(self, lab: Lab, control: str, address: str) -> None:
        self.address = address
        with lab.network():
            self._control = socket.create_connection((control, _CONTROL), _ANSWER_S)
        self._lines = self._control.makefile("rw", encoding="utf-8")

    def call(self, do: str, **fields: Any) -> Any:
        """Asks, and waits for the answer."""
        self._lines.write(json.dumps({"do": do, **fields}) + "\n")
        self._lines.flush()
        answer = json.loads(self._lines.readline())
        assert "error" not in answer, answer["error"]
        return answer

    def close(self) -> None:
        self._lines.close()
        self._control.close()

    # ---- what is wanted of it ----

    def serves(self) -> None:
        assert self.call("serve") == {"says": "listens"}

    def talks(self, other: Peer, size: int = 3000, **how: float) -> None:
        assert self.call("talk", address=other.address, size=size, **how) == {"says": "talks"}

    def ends_well(self) -> int:
        """Its client is told to end; how many messages have come back, and every byte was right."""
        done = self.call("finish")
        assert done["code"] == 0, done
        assert done["says"][0].startswith("right: "), done
        assert done["says"][1] == "the end came", done
        return int(done["says"][0].split()[1])

    def wait_for(self, happened: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        end = time.monotonic() + _ANSWER_S
        while not happened(found := self.call("look")):
            assert time.monotonic() < end, json.dumps(found)
            time.sleep(_LOOK_S)  # each look costs the guest more than that of its time
        return dict(found)

    def promoted(self, device: str) -> None:
        wanted = {f"{device}@{self.address}"}
        self.wait_for(lambda found: set(found["devices"]) == wanted and any(each["promoted"] for each in found["ends"]))

    def on_tcp(self) -> None:
        self.wait_for(lambda found: not found["devices"] and [each["state"] for each in found["ends"]] == ["pinned"])

    def nothing_was_reset(self) -> None:
        counters = self.call("look")["counters"]
        assert not [name for name in counters if name.startswith("relay_reset")], counters


@contextmanager
def in_guest(lab: Lab, promote: str = gain.ALWAYS) -> Iterator[Peer]:
    """A guest whose provider has `verbs`."""
    arguments = (lab.siw_address, str(_CONTROL), lab.rxe_address, _NETWORK, "verbs", promote)
    command = " ".join(lab.python_in_guest("verbs_host.py", *arguments))
    program = lab.background("verbs_host", f"exec {command}")
    program.wait_for("ready", _ANSWER_S)
    peer = Peer(lab, lab.siw_address, lab.rxe_address)
    try:
        yield peer
    finally:
        peer.close()
        lab.wait(f"! kill -0 {program.pid} 2>/dev/null")


@contextmanager
def on_this_machine(lab: Lab, promote: str = gain.ALWAYS) -> Iterator[Peer]:
    """This machine, whose provider has the software HCA."""
    address, control = lab.rxe_host_address, lab.host_address
    argv = [sys.executable, str(_PROGRAM), control, str(_CONTROL), address, _NETWORK, "roce", promote]
    with lab.network():
        program = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    with program:
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        peer = Peer(lab, control, address)
        try:
            yield peer
        finally:
            peer.close()


@pytest.fixture
def peers() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_promoted_between_the_kernels_rxe_and_the_software_hca(lab: Lab, peers: ExitStack) -> None:
    guest, own = peers.enter_context(in_guest(lab)), peers.enter_context(on_this_machine(lab))
    promoted_both_ways(guest, "verbs", own, "roce")


def test_promoted_between_two_kernels(lab: Lab, second: Lab | Unusable, peers: ExitStack) -> None:
    if isinstance(second, Unusable):
        pytest.skip(str(second))  # there is no lab, or no room for a second guest: it says which
    one, other = peers.enter_context(in_guest(lab)), peers.enter_context(in_guest(second))
    promoted_both_ways(one, "verbs", other, "verbs")


def promoted_both_ways(one: Peer, device: str, other: Peer, other_device: str) -> None:
    """Each end asks once, with short messages and with such as take many packets; every byte comes back."""
    one.serves()
    other.serves()
    for asks, answers, size in ((one, other, 3000), (other, one, 30_000)):
        asks.talks(answers, size)
        one.promoted(device)
        other.promoted(other_device)
        assert asks.ends_well() > 0
        for each in (one, other):
            each.wait_for(lambda found: not found["devices"])
    for each in (one, other):
        each.nothing_was_reset()


def test_rings_whose_pages_are_given_back_between_two_messages(lab: Lab, peers: ExitStack) -> None:
    """After a second of rest, by the shim: a device that had pinned them would send what was there before."""
    guest, own = peers.enter_context(in_guest(lab)), peers.enter_context(on_this_machine(lab))
    own.serves()
    guest.talks(own, _LARGE, pause_s=_REST_S)
    guest.promoted("verbs")
    guest.wait_for(lambda found: [each["sent"] >= 5 * _LARGE for each in found["ends"]] == [True])
    assert guest.ends_well() > 5


def test_the_kernel_counts_alike_what_is_pinned(lab: Lab, peers: ExitStack) -> None:
    """While nothing is under way: the memory of the device, and of one connection."""
    guest, own = peers.enter_context(in_guest(lab)), peers.enter_context(on_this_machine(lab))
    guest.serves()
    own.talks(guest, _LARGE, pause_s=_REST_S)
    guest.promoted("verbs")
    found = guest.wait_for(lambda found: found["pinned"] == found["pinned_by_kernel"] > 0)
    assert found["pinned"] < 8 << 20
    assert own.ends_well() > 0


def test_a_conversation_leaves_tcp_over_verbs_alone(lab: Lab, peers: ExitStack) -> None:
    """By its gain: who asks judges, by what it would go over."""
    guest = peers.enter_context(in_guest(lab, gain.BY_GAIN))
    own = peers.enter_context(on_this_machine(lab, gain.BY_GAIN))
    own.serves()
    guest.talks(own)
    guest.promoted("verbs")
    assert guest.ends_well() > 0
    guest.serves()
    own.talks(guest)
    own.wait_for(lambda found: [each["reason"] for each in found["ends"]] == [Reason.LATENCY.name])
    assert own.ends_well() > 0


@dataclass(frozen=True, slots=True)
class Talk:
    """A conversation under load over the guest's verbs and our roce."""

    guest: Peer
    own: Peer
    talker: Peer
    server: Peer

    def goes_on_by_tcp(self) -> None:
        self.guest.on_tcp()
        self.own.on_tcp()

    def is_promoted(self) -> None:
        self.guest.promoted("verbs")
        self.own.promoted("roce")

    def ends_well(self) -> None:
        """Every byte has come back; and the next one is promoted again."""
        assert self.talker.ends_well() > 1
        for each in (self.guest, self.own):
            each.nothing_was_reset()
        self.talker.talks(self.server)
        self.is_promoted()
        assert self.talker.ends_well() > 0


@pytest.fixture(params=["guest", "this machine"])
def talk(request: pytest.FixtureRequest, lab: Lab, peers: ExitStack) -> Talk:
    """One that either of the two has asked for."""
    guest, own = peers.enter_context(in_guest(lab)), peers.enter_context(on_this_machine(lab))
    talker, server = (guest, own) if request.param == "guest" else (own, guest)
    server.serves()
    talker.talks(server, 50_000)
    found = Talk(guest, own, talker, server)
    found.is_promoted()
    return found


def test_the_kernels_device_is_taken_away_and_tcp_goes_on(lab: Lab, talk: Talk) -> None:
    """Under load, and then the driver too: what waits for the provider to let go of the device waits for moments."""
    try:
        lab.run(["rdma", "link", "delete", "rxe0"], timeout_s=_ANSWER_S)
        lab.run(["rmmod", "rdma_rxe"])
        talk.goes_on_by_tcp()
    finally:
        lab.run("modprobe rdma_rxe; rdma link show rxe0/1 || rdma link add rxe0 type rxe netdev eth1")
    talk.ends_well()


@pytest.mark.parametrize(
    ("event", "away", "back"),
    [
        ("PORT_ERROR", "ip link set dev eth1 down", "ip link set dev eth1 up"),
        ("GID_CHANGE", "ip address del {address}/24 dev eth1", "ip address add {address}/24 dev eth1"),
    ],
)
def test_the_way_is_away_for_a_time_and_tcp_goes_on(lab: Lab, talk: Talk, event: str, away: str, back: str) -> None:
    """TCP has no other one, and waits, too; so does the control link, by which both ends find out where it goes on."""
    lab.run("sysctl -w net.ipv6.conf.eth1.keep_addr_on_down=1")  # IPv4's stay anyway
    try:
        lab.run(away.format(address=lab.rxe_address))
        talk.guest.wait_for(lambda found: f"is given up, {event}" in found["log"])
    finally:
        lab.run(back.format(address=lab.rxe_address))
    talk.goes_on_by_tcp()
    talk.ends_well()


def test_an_address_that_nothing_goes_over_comes_and_goes(lab: Lab, talk: Talk) -> None:
    """The table of GIDs changes, and the entry in use stays where it is."""
    for change in ("add", "del"):
        lab.run(["ip", "address", change, f"{lab.rxe_nobody}/24", "dev", "eth1"])
        talk.is_promoted()
    assert talk.talker.ends_well() > 1
    log = talk.guest.call("look")["log"]
    assert "is given up" not in log, log
