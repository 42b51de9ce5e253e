"""The software HCA as the conformance suite wants it: two devices on addresses of the loopback interface."""

from __future__ import annotations

from loop_dut import LoopUnderTest, addresses

from sidestep.rdma.roce.device import ATTRIBUTES
from sidestep.rdma.roce.settings import RoceSettings
from sidestep.rdma.roce.udp_link import UdpRoceDevice
from sidestep.rdma.verbs import DeviceAttributes

QUICK = RoceSettings(cm_timeout_code=14, ack_timeout_code=12, timewait_s=0.01, cm_retries=5)  # 67 and 17 ms


class UdpUnderTest(LoopUnderTest):
    """Where nobody answers is no socket."""

    def __init__(self, settings: RoceSettings = QUICK, attributes: DeviceAttributes = ATTRIBUTES) -> None:
        one, two, three = addresses()
        super().__init__(three)
        self.active = UdpRoceDevice(one, self.loop, settings, name="active", attributes=attributes)
        self.passive = UdpRoceDevice(two, self.loop, settings, name="passive", attributes=attributes)
