"""The loopback device: both ends in one process, for tests, simulation and benchmarks.

    fabric = Fabric(Random(seed))
    left, right = fabric.device("left"), fabric.device("right")
    ...  # connect, post
    fabric.run()

See `fabric` for time, `settings` for delays and faults, `observer` for what can be watched.
"""

from sidestep.rdma.loopback.device import LoopbackDevice
from sidestep.rdma.loopback.fabric import Fabric, Timer
from sidestep.rdma.loopback.observer import CmMessage, Kind, Observer, Placed, QpMessage, Recorder
from sidestep.rdma.loopback.settings import NO_DELAY, CmKind, Faults, Timing

__all__ = [
    "NO_DELAY",
    "CmKind",
    "CmMessage",
    "Fabric",
    "Faults",
    "Kind",
    "LoopbackDevice",
    "Observer",
    "Placed",
    "QpMessage",
    "Recorder",
    "Timer",
    "Timing",
]
