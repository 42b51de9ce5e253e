"""Two connected ends on a loopback fabric, and everything that was told to them."""

from __future__ import annotations

from verbs_end import DrivenEnd

from sidestep.rdma.cm import ConnectionRequest
from sidestep.rdma.loopback import Fabric, LoopbackDevice
from sidestep.rdma.loopback.manager import LoopbackConnection
from sidestep.rdma.loopback.qp import LoopbackQueuePair
from sidestep.rdma.verbs import DeviceAttributes, QpCapabilities

SERVICE = 0x1_1389


class End(DrivenEnd):
    """One of them; `fabric.run` fills its lists."""

    device: LoopbackDevice
    qp: LoopbackQueuePair
    connection: LoopbackConnection | None

    def disconnect(self) -> None:
        assert self.connection is not None
        self.connection.disconnect()


def ends(
    fabric: Fabric, capabilities: QpCapabilities | None = None, attributes: DeviceAttributes | None = None
) -> tuple[End, End]:
    """Two ends that are not connected; the second one accepts."""
    number = len(fabric.devices)
    active = End.of(fabric.device(f"device{number}", attributes), capabilities)
    passive = End.of(fabric.device(f"device{number + 1}", attributes), capabilities)

    def on_request(request: ConnectionRequest) -> None:
        connection = request.accept(passive.qp, b"", lambda _, event: passive.told.append(event))
        assert isinstance(connection, LoopbackConnection)
        passive.connection = connection

    passive.device.cm.listen(SERVICE, on_request)
    return active, passive


def connect(active: End, passive: End) -> None:
    """Asks; what comes of it needs a run of the fabric."""
    connection = active.device.cm.connect(
        passive.device.address, SERVICE, active.qp, b"", lambda _, event: active.told.append(event)
    )
    assert isinstance(connection, LoopbackConnection)
    active.connection = connection


def connected(
    fabric: Fabric, capabilities: QpCapabilities | None = None, attributes: DeviceAttributes | None = None
) -> tuple[End, End]:
    active, passive = ends(fabric, capabilities, attributes)
    connect(active, passive)
    fabric.run()
    assert (active.kinds, passive.kinds) == (["Established"], ["Established"])
    return active, passive
