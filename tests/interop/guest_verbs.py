"""A consumer of verbs in the guest, and one of our device on this machine: the two ends of a test."""

from __future__ import annotations

import json
import select
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import shake_128
from pathlib import Path
from typing import Any, Final, Self, TypeAlias

from lab_guest import Background, Lab
from verbs_end import VerbsEnd

from sidestep.rdma.cm import ConnectionRequest, Established, Listener
from sidestep.rdma.iwarp.device import IwarpDevice
from sidestep.rdma.roce.ip_cm import TCP_SERVICE
from sidestep.rdma.roce.udp_link import UdpRoceDevice
from sidestep.rdma.verbs import QpCapabilities
from sidestep.rdma.work import Completion, Opcode, RKey, Send, Status

WAIT_S: Final = 60.0  # whatever happens at all happens earlier, unless the machine is very busy
_PROGRAM: Final = Path(__file__).parent / "guest" / "verbs_agent.py"
_PLACE: Final = "/run/verbs_agent.py"  # in the guest
_CONTROL_PORT: Final = 7100


OurDevice: TypeAlias = IwarpDevice | UdpRoceDevice


def pattern(seed: int, length: int) -> bytes:
    """What the ends write and look for; the guest's side has the same."""
    return shake_128(str(seed).encode()).digest(length)


def start_agents(lab: Lab, address: str) -> Background:
    """What `GuestVerbs` connects to: makes consumers on the device that has this address."""
    lab.run(f"pkill -KILL -f '[v]erbs_agent.py {address}'; true")  # of a run before, in a guest that stays
    lab.push(_PROGRAM, _PLACE)
    agents = lab.background(f"verbs_agent-{address}", f"exec python3 {_PLACE} {address} {_CONTROL_PORT}")
    agents.wait_for("ready")
    return agents


class GuestVerbs:
    """A consumer in the guest. While it is waited for, our device goes on."""

    def __init__(self, lab: Lab, device: OurDevice, address: str) -> None:
        self._loop = device.loop
        self._control = lab.connect(_CONTROL_PORT, address=address)
        self._buffer = b""
        self.answers: list[dict[str, Any]] = []
        self.gone = False
        self._loop.watch(self._control.fileno(), select.EPOLLIN, self._on_readable)

    def ask(self, do: str, **fields: Any) -> None:
        """Without waiting for the answer."""
        self._control.sendall(json.dumps({"do": do, **fields}).encode() + b"\n")

    def answer(self) -> dict[str, Any]:
        """The next one; an error that the consumer tells is an AssertionError."""
        assert self._loop.run_until(lambda: bool(self.answers) or self.gone, WAIT_S), "the guest does not answer"
        assert self.answers, "the program in the guest is gone"
        answer = self.answers.pop(0)
        assert "error" not in answer, answer["error"]
        return answer

    def call(self, do: str, **fields: Any) -> dict[str, Any]:
        """Asks, and waits for the answer."""
        self.ask(do, **fields)
        return self.answer()

    def expect(self, kind: str) -> bytes:
        """The next event of its connection manager, which is to be that one; its private data."""
        answer = self.call("event")
        assert answer["event"] == kind, answer
        return bytes.fromhex(answer["private_data"])

    def close(self) -> None:
        """The program ends."""
        if self._control.fileno() >= 0:
            self._loop.forget(self._control.fileno())
            self._control.close()

    def _on_readable(self, events: int) -> None:
        try:
            piece = self._control.recv(65536)
        except ConnectionResetError:
            piece = b""
        if not piece:
            self.gone = True
            self.close()
            return
        *lines, self._buffer = (self._buffer + piece).split(b"\n")
        self.answers += map(json.loads, lines)


class End(VerbsEnd):
    """One of ours."""

    device: OurDevice

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Waits for it."""
        assert self.device.loop.run_until(condition, WAIT_S), f"not {what}: {self}"

    @property
    def why(self) -> str:
        """The words of its one asynchronous event."""
        self.until(lambda: bool(self.events), "an event")
        (event,) = self.events
        return f"{event.kind.name}: {event.why}"

    def of_kind(self, *opcodes: Opcode) -> list[Completion]:
        return [each for each in self.done if each.opcode in opcodes]

    def send(self, content: bytes, wr_id: int = 0) -> None:
        self.qp.post_send(Send(wr_id, (self.memory(content).view,) if content else ()))

    def sent(self, count: int) -> list[Status]:
        """How so many requests have ended."""
        found = self._wait(count, *(opcode for opcode in Opcode if opcode is not Opcode.RECEIVE))
        return [each.status for each in found]

    def received(self, count: int) -> list[Completion]:
        """How so many receives have ended."""
        return self._wait(count, Opcode.RECEIVE)

    def _wait(self, count: int, *opcodes: Opcode) -> list[Completion]:
        self.until(lambda: len(self.of_kind(*opcodes)) >= count, f"{count} completions")
        found = self.of_kind(*opcodes)[:count]
        for each in found:
            self.done.remove(each)
        return found

    def ended(self) -> None:
        """Waits for the connection's last event."""
        self.until(lambda: "TimewaitExit" in self.kinds or "Rejected" in self.kinds, "the end")

    # ---- connections ----

    def connect(self, lab: Lab, port: int, private_data: bytes = b"") -> None:
        """To siw."""
        self.ask(lab.siw_address, port, private_data)

    def ask(self, address: str, service_id: int, private_data: bytes = b"") -> None:
        self.connection = self.device.cm.connect(address, service_id, self.qp, private_data, self.on_cm)

    def accept(self, request: ConnectionRequest, private_data: bytes = b"") -> None:
        self.connection = request.accept(self.qp, private_data, self.on_cm)

    def established(self) -> bytes:
        """Waits for it; the private data of the Reply."""
        self.until(lambda: bool(self.told), "established")
        first = self.told[0]
        assert isinstance(first, Established), self
        return first.private_data


class Requests:
    """A listener of ours, and who asked."""

    def __init__(self, device: OurDevice, service_id: int = 0) -> None:
        self._device = device
        self.all: list[ConnectionRequest] = []
        self.listener: Listener = device.cm.listen(service_id, self.all.append)
        self.port = self.listener.service_id & 0xFFFF

    def next(self) -> ConnectionRequest:
        """The oldest."""
        assert self._device.loop.run_until(lambda: bool(self.all), WAIT_S), "nobody has asked"
        return self.all.pop(0)


@dataclass(frozen=True, slots=True)
class Remote:
    """Memory of the guest."""

    region: int
    address: int
    key: RKey

    @classmethod
    def of(cls, told: dict[str, Any]) -> Self:
        return cls(told["region"], told["address"], RKey(told["key"]))


class Bench:
    """The lab, our device and what tests do with them."""

    services = 0  # what a port is added to for a service id

    def __init__(self, lab: Lab, device: OurDevice, guest_address: str) -> None:
        self.lab = lab
        self.device = device
        self.guest_address = guest_address
        self._guests: list[GuestVerbs] = []

    def guest(self) -> GuestVerbs:
        """A new consumer in the guest."""
        self._guests.append(GuestVerbs(self.lab, self.device, self.guest_address))
        return self._guests[-1]

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Waits for it."""
        assert self.device.loop.run_until(condition, WAIT_S), f"not {what}"

    def close(self) -> None:
        for guest in self._guests:
            guest.close()
        self.device.close()

    def pair(self, asks: str, capabilities: QpCapabilities | None = None, port: int = 7300) -> tuple[End, GuestVerbs]:
        """Two connected ends; `asks` says who was the initiator: "ours" or the guest's."""
        ours, guest = End.of(self.device, capabilities), self.guest()
        if asks == "ours":
            guest.call("listen", port=port)
            ours.ask(self.guest_address, self.services + port)
            guest.expect("CONNECT_REQUEST")
            guest.call("create_qp")
            guest.call("accept")
            ours.established()
            guest.expect("ESTABLISHED")
            return ours, guest
        requests = self.requests()
        guest.call("resolve", address=self.device.address, port=requests.port)
        guest.call("create_qp")
        guest.call("connect")
        ours.room(1)
        ours.accept(requests.next())
        requests.listener.close()
        guest.expect("ESTABLISHED")
        ours.established()
        # Who has asked begins (RFC 5044 7.1.2 rule 4), and unless it is peer-to-peer siw leaves that to its user.
        guest.call("send", region=self.remote(guest, 1).region, length=1)
        guest.call("sent")
        ours.received(1)
        return ours, guest

    def requests(self) -> Requests:
        """A listener of ours."""
        return Requests(self.device)

    def remote(self, guest: GuestVerbs, length: int, rights: str = "both", seed: int | None = None) -> Remote:
        """New memory of the guest."""
        return Remote.of(guest.call("region", length=length, rights=rights, seed=seed))


class RxeBench(Bench):
    """The same with our device that rxe talks to."""

    services = TCP_SERVICE
    _PORT: Final = 7350

    def requests(self) -> Requests:
        return Requests(self.device, self.services + self._PORT)
