"""The kernel's devices as libibverbs tells of them, and the one that has an address, without rdma_cm.

librdmacm keeps a device open that it has seen, as long as the process lives; so nobody could delete the device. What
joins queue pairs by number does without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import POINTER, byref, c_int, c_void_p, cast
from typing import TYPE_CHECKING, Any, Final

from sidestep.errors import Misuse, Unavailable
from sidestep.rdma.cm import Connection, PortManager
from sidestep.rdma.kernel import abi, gids
from sidestep.rdma.kernel.libraries import told
from sidestep.rdma.kernel.sysfs import ETHERNET, IWARP, ROCE_V2, GidView, KernelDeviceView, PortView

if TYPE_CHECKING:
    from collections.abc import Callable

    from sidestep.rdma.kernel.libraries import Libraries

_STATES: Final = {1: "DOWN", 2: "INIT", 3: "ARMED", 4: "ACTIVE", 5: "ACTIVE_DEFER"}  # enum ibv_port_state


def devices(libraries: Libraries) -> list[KernelDeviceView]:
    """All of them, as sysfs names what they are, but by a few calls; raises Unavailable."""
    found = []
    for context, info in _opened(libraries):
        device = abi.DeviceAttr()
        libraries.ibv_query_device(context, byref(device))
        iwarp = info.transport_type == abi.TRANSPORT_IWARP
        ports = [_port(libraries, context, number) for number in range(1, device.phys_port_cnt + 1)]
        found.append(KernelDeviceView(info.name.decode(), IWARP if iwarp else "CA", "", ports))
    return found


def open_context(libraries: Libraries, address: str) -> tuple[int, int, str]:
    """A context of the device that has the address for RoCE v2, its port, and its name; raises Unavailable."""
    kept: list[int] = []
    found = None
    for context, info in _opened(libraries, keep=kept.__contains__):
        if found is not None:
            continue
        device = abi.DeviceAttr()
        libraries.ibv_query_device(context, byref(device))
        for number in range(1, device.phys_port_cnt + 1):
            if found is None and gids.choose(gids.entries(libraries, context, number), address) is not None:
                kept.append(context)
                found = context, number, info.name.decode()
    if found is not None:
        return found
    raise Unavailable(f"no RDMA device has a GID of RoCE v2 for {address}", remedy="'sidestep rdma list' shows them")


def _opened(libraries: Libraries, keep: Callable[[int], bool] = lambda _context: False) -> Iterator[tuple[int, Any]]:
    """Each device, open until the next one is asked for, unless it is kept."""
    count = c_int()
    try:
        listed = libraries.ibv_get_device_list(byref(count))
    except OSError as error:
        raise Unavailable(f"the kernel's RDMA devices cannot be listed: {error.strerror}") from error
    try:
        for info in cast(listed, POINTER(POINTER(abi.DeviceInfo)))[: count.value]:
            try:
                context = libraries.ibv_open_device(cast(info, c_void_p))
            except OSError as error:
                raise told(error, f"{info.contents.name.decode()} cannot be opened") from error
            try:
                yield context, info.contents
            finally:
                if not keep(context):
                    libraries.ibv_close_device(context)
    except OSError as error:
        raise told(error, "an RDMA device does not say what it is") from error
    finally:
        libraries.ibv_free_device_list(listed)


def _port(libraries: Libraries, context: int, number: int) -> PortView:
    port = abi.PortAttr()
    libraries.ibv_query_port(context, number, byref(port))
    table = [
        GidView(each.index, gids.written(each.gid), ROCE_V2 if each.kind == abi.GID_ROCE_V2 else "IB/RoCE v1", "")
        for each in gids.entries(libraries, context, number)
    ]
    layer = ETHERNET if port.link_layer == abi.LINK_LAYER_ETHERNET else "InfiniBand"
    return PortView(number, _STATES.get(port.state, "NOP"), layer, "", table)


class NoManager(PortManager):
    """In the place of a connection manager: queue pairs of this device are joined by number."""

    def check_target(self, address: str, service_id: int) -> str:
        raise Misuse("this device has been opened without a connection manager")

    def open_port(self, number: int) -> Any:
        raise Misuse("this device has been opened without a connection manager")

    def make_connection(self, *_what: Any) -> Connection:
        raise NotImplementedError

    def release(self) -> None:
        """It has nothing."""
