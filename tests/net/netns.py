"""A private network namespace, changes in it, and who follows them."""

from __future__ import annotations

import json
import select
import subprocess
import time
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest
from common import PATIENCE_S

from sidestep import limits
from sidestep.counters import Counters
from sidestep.observe.namespaces import thread_in_netns
from sidestep.provider.network.routes import Network
from sidestep.routing import AddressEvent, Change, ChangesLost, LinkEvent, NetworkEvent

TIMEOUT_S = PATIENCE_S


def private_netns() -> AbstractContextManager[None]:
    """This thread and its children are in a new network namespace; it goes with the last socket in it."""
    return thread_in_netns(None)


def ip(command: str) -> None:
    """Runs `ip`; what it changed is announced when this returns."""
    subprocess.run(["ip", *command.split()], check=True, timeout=TIMEOUT_S, capture_output=True)


def batch(commands: list[str], *, force: bool = False) -> None:
    """Runs many commands in one `ip`, which takes no options in them; with `force` some may fail."""
    argv = ["ip", *(["-force"] if force else []), "-batch", "-"]
    text = "\n".join(commands)
    subprocess.run(argv, input=text, text=True, check=not force, timeout=60, capture_output=True)


def ip_json(command: str) -> Any:
    """What `ip -j` says; raises CalledProcessError if it says no."""
    found = subprocess.run(["ip", "-j", *command.split()], check=True, timeout=TIMEOUT_S, capture_output=True)
    return json.loads(found.stdout or "[]")


def veth(*names: str) -> None:
    """A pair of interfaces that are up, without addresses."""
    ip(f"link add {names[0]} type veth peer name {names[1]}")
    for name in names:
        ip(f"link set {name} addrgenmode none")  # no IPv6 addresses of its own accord
        ip(f"link set {name} up")


def index_of(interface: str) -> int:
    """The number of an interface."""
    return int(ip_json(f"link show {interface}")[0]["ifindex"])


class Follower:
    """A `Network`, what it told, and what somebody knows who believes all of it."""

    def __init__(self, receive_buffer: int = limits.NETLINK_RECEIVE_BUFFER) -> None:
        self.told: list[NetworkEvent] = []
        self.counters = Counters()
        self.network = Network(self._hear, counters=self.counters, receive_buffer=receive_buffer)
        self._known = {_identity(event): event for event in self.network.present()}
        self.lost = 0
        self._poll = select.poll()
        self._poll.register(self.network, select.POLLIN)

    def _hear(self, event: NetworkEvent) -> None:
        self.told.append(event)
        if isinstance(event, ChangesLost):
            self.lost += 1
            self._known.clear()
            return
        if event.change is Change.ADDED:
            self._known[_identity(event)] = event
        else:
            self._known.pop(_identity(event), None)

    @property
    def believed(self) -> set[NetworkEvent]:
        """What somebody knows who was told all of this."""
        return set(self._known.values())

    def interfaces(self) -> list[LinkEvent]:
        """Those that the network knows."""
        return [event for event in self.network.present() if isinstance(event, LinkEvent)]

    def addresses(self) -> list[AddressEvent]:
        """Those that the network knows."""
        return [event for event in self.network.present() if isinstance(event, AddressEvent)]

    def settle(self) -> list[NetworkEvent]:
        """Takes in everything that has been announced; what was told since the last call."""
        while self._poll.poll(0):
            self.network.handle_readable()
        told, self.told = self.told, []
        return told

    def wait_for(self, *expected: NetworkEvent) -> list[NetworkEvent]:
        """Takes in what comes until all these have been told; what was told since the last call.

        Carriers, and IPv6 addresses, come when the kernel gets round to them.
        """
        deadline = time.monotonic() + TIMEOUT_S
        while missing := [event for event in expected if event not in self.told]:
            if not self._poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                pytest.fail(f"never told: {missing}\ntold: {self.told}")
            self.network.handle_readable()
        return self.settle()

    def agrees(self) -> None:
        """Takes in what comes until the believer knows what one sees who looks for the first time."""
        deadline = time.monotonic() + TIMEOUT_S
        self.settle()
        while self.believed != (seen := fresh_view()):
            if not self._poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                pytest.fail(f"believed but not there: {self.believed - seen}\nthere: {seen - self.believed}")
            self.settle()


def _identity(event: NetworkEvent) -> object:
    """What stays the same of a thing while it changes."""
    if isinstance(event, LinkEvent):
        return event.interface_index
    return event if isinstance(event, ChangesLost) else replace(event, change=Change.ADDED)


def fresh_view() -> set[NetworkEvent]:
    """What one sees who looks for the first time."""
    network = Network(lambda event: None)
    try:
        return set(network.present())
    finally:
        network.close()
