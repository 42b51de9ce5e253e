"""Devices whose queue pairs are connected by a control link keep the rules of those with a connection manager."""

from __future__ import annotations

from collections.abc import Callable
from ipaddress import ip_address
from random import Random
from typing import Final

import pytest
from loopback_dut import LoopbackUnderTest

from sidestep.rdma.cm import REJECT_CONSUMER, REJECT_INVALID_SERVICE_ID, ConnectionRequest, Rejected, Unreachable
from sidestep.rdma.conformance import CHECKS, Check, run
from sidestep.rdma.loopback import Fabric
from sidestep.rdma.verbs import DeviceAttributes
from sidestep.remote.control_link import PRIVATE_DATA_MAX, ControlLink, Req, Talker
from sidestep.remote.control_manager import ControlManager, ControlQuestion
from sidestep.sdp.endpoint import SdpStream
from sidestep.sdp.requests import SdpEvent, Told
from sidestep.sdp.settings import Addresses
from sidestep.sdp.stack import stack_on
from sidestep.sdp.wire import service_id

WIRE: Final = "loopback"
ATTRIBUTES: Final = DeviceAttributes(
    request_private_data_max=PRIVATE_DATA_MAX,
    reply_private_data_max=PRIVATE_DATA_MAX,
    reject_private_data_max=PRIVATE_DATA_MAX,
    private_data_padded=False,
)


class JoinedUnderTest(LoopbackUnderTest):
    """Two devices, and two more for the control link."""

    def __init__(self, seed: int) -> None:
        super().__init__(Fabric(Random(seed)), ATTRIBUTES)
        self.link: ControlLink | None = None
        self.managers = {
            "active": ControlManager(self.active, self.fabric, WIRE, self.reach),
            "passive": ControlManager(self.passive, self.fabric, WIRE, lambda _address, reached: reached(None)),
        }
        for device in (self.active, self.passive):
            device.cm = self.managers[device.name]  # type: ignore[misc]  # LoopbackDevice has it
        self.stacks = [stack_on(self.fabric, self.fabric.device(name)) for name in ("asks", "answers")]
        one, other = self.stacks
        other.listen(1, self.accepted)
        addresses = Addresses(ip_address("10.0.0.1"), 2, ip_address("10.0.0.2"), 1)
        one.connect("answers", addresses, self.told)
        self.fabric.run_until(lambda: self.link is not None)
        self.fabric.run()

    def told(self, stream: SdpStream, event: Told) -> None:
        assert isinstance(event, SdpEvent)
        self.link = ControlLink(stream, self.fabric, None, lambda: None, print)
        self.link.begin()

    def accepted(self, stream: SdpStream) -> None:
        ControlLink(stream, self.fabric, self.asked, lambda: None, print)

    def asked(self, link: ControlLink, number: int, req: Req) -> Talker | None:
        assert req.wire == WIRE
        return self.managers["passive"].take(link, number, req)

    def reach(self, address: str, reached: Callable[[ControlLink | None], None]) -> None:
        reached(self.link if address == "passive" else None)

    def close(self) -> None:
        super().close()
        for stack in self.stacks:
            stack.close()


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("check", CHECKS, ids=str)
def test_a_joined_device_keeps_the_rule(check: Check, seed: int) -> None:
    why_not = run(check, lambda: JoinedUnderTest(seed))
    if why_not is not None:
        pytest.skip(why_not)  # the device does not promise it: its attributes say so


class Asking:
    """Somebody who asks, and a manager that is asked."""

    def __init__(self) -> None:
        self.world = JoinedUnderTest(1)
        self.requests: list[ConnectionRequest] = []
        self.heard: list[Rejected | Unreachable] = []

    def listens(self) -> None:
        self.world.managers["passive"].listen(service_id(0), self.requests.append)

    def ask(self, address: str = "passive") -> ControlQuestion:
        world = self.world
        return ControlQuestion(world.fabric, WIRE, world.reach, address, b"a question", self.heard.append)


def test_a_question_takes_no_queue_pair_and_is_answered_by_a_rejection() -> None:
    asking = Asking()
    asking.listens()
    asking.world.active.close()  # the device that it is about
    asking.ask()
    asking.world.run()
    (request,) = asking.requests
    assert request.private_data == b"a question"
    request.reject(private_data=b"an answer")
    asking.world.run()
    assert asking.heard == [Rejected(REJECT_CONSUMER, b"an answer")]


def test_a_question_is_told_that_nobody_listens_or_is_there() -> None:
    asking = Asking()
    asking.ask()
    asking.ask("nowhere")
    asking.world.run()
    assert sorted(asking.heard, key=str) == [Rejected(REJECT_INVALID_SERVICE_ID), Unreachable()]


def test_a_closed_question_is_withdrawn_and_hears_nothing() -> None:
    asking = Asking()
    asking.listens()
    question = asking.ask()
    asking.world.run()
    question.close()
    asking.world.run()
    asking.requests[0].reject(private_data=b"an answer")  # who asked is gone, which is no fault
    asking.world.run()
    assert asking.heard == []


def test_a_question_cannot_be_accepted() -> None:
    """It names no queue pair: who accepts it hears that the other end is not reached, and so does who asked."""
    asking = Asking()
    asking.listens()
    asking.ask()
    asking.world.run()
    device = asking.world.passive
    queue = device.create_cq(8)
    told: list[object] = []
    asking.requests[0].accept(device.alloc_pd().create_qp(queue, queue), b"", lambda _made, event: told.append(event))
    asking.world.run()
    assert told == [Unreachable()]
    assert [type(each) for each in asking.heard] == [Rejected]
