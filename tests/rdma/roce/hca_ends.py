"""Two connected ends on a wire in virtual time, and everything that was told to them."""

from __future__ import annotations

from random import Random

from verbs_end import DrivenEnd

from sidestep.rdma.cm import ConnectionRequest
from sidestep.rdma.roce.manager import RoceConnection
from sidestep.rdma.roce.qp import RoceQueuePair
from sidestep.rdma.roce.settings import RoceSettings
from sidestep.rdma.roce.wire import Wire, WireDevice, WireFaults
from sidestep.rdma.verbs import QpCapabilities

SERVICE = 0x1_1389
LEFT, RIGHT = "fd00::1", "fd00::2"  # over IPv6 the checksum has its full strength


class HcaEnd(DrivenEnd):
    """One of them; driving the wire fills its lists."""

    device: WireDevice
    qp: RoceQueuePair
    connection: RoceConnection | None


def ends(
    wire: Wire, capabilities: QpCapabilities | None = None, settings: RoceSettings | None = None
) -> tuple[HcaEnd, HcaEnd]:
    """Two ends that are not connected; the second one accepts."""
    active, passive = (HcaEnd.of(wire.device(address, settings), capabilities) for address in (LEFT, RIGHT))

    def on_request(request: ConnectionRequest) -> None:
        if passive.connection is not None:
            request.reject()
            return
        connection = request.accept(passive.qp, b"", lambda _, event: passive.told.append(event))
        assert isinstance(connection, RoceConnection)
        passive.connection = connection

    passive.device.cm.listen(SERVICE, on_request)
    return active, passive


def ask(active: HcaEnd) -> None:
    """Asks; what comes of it needs a run of the wire."""
    active.connection = active.device.cm.connect(
        RIGHT, SERVICE, active.qp, b"", lambda _, event: active.told.append(event)
    )


def connected(
    seed: int = 1,
    faults: WireFaults | None = None,
    capabilities: QpCapabilities | None = None,
    settings: RoceSettings | None = None,
) -> tuple[Wire, HcaEnd, HcaEnd]:
    """On a wire that is perfect until they are connected."""
    wire = Wire(Random(seed))
    active, passive = ends(wire, capabilities, settings)
    ask(active)
    wire.run()
    assert (active.kinds, passive.kinds) == (["Established"], ["Established"])
    wire.faults = faults or wire.faults
    return wire, active, passive
