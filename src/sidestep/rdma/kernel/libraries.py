"""libibverbs and librdmacm, loaded when the first device is opened.

sidestep is neither built with them nor needs them: without a library opening a device is `Unavailable`, which names the
package. ctypes is enough: a call of verbs goes into the kernel or rings a doorbell and takes longer than the way there,
and nothing is called back.

**Fork.** A registered page is pinned: after a fork the first who writes to it gets a copy, and if that is the parent,
the adapter goes on with a page that nobody sees any more. `ibv_fork_init` is called before anything else: where the
kernel copies pinned pages for the child (Linux 5.12 and later) it does nothing, elsewhere it keeps registered pages
away from children (ibv_fork_init(3)). Those pages may have other objects of Python's on them, so on such a kernel a
child must exec at once, as subprocess and posix_spawn do; workers are to be started before a device is opened.
"""

from __future__ import annotations

import ctypes
import errno
import os
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_ssize_t, c_uint8, c_uint16, c_uint32, c_void_p
from functools import cache
from typing import Any, Final

from sidestep.errors import LimitReached, SidestepError, Unavailable
from sidestep.rdma.kernel import abi

_VERBS: Final = "libibverbs.so.1"
_CM: Final = "librdmacm.so.1"
PACKAGES: Final = {
    _VERBS: "libibverbs1 and ibverbs-providers (Debian, Ubuntu), or libibverbs (Fedora, RHEL)",
    _CM: "librdmacm1 (Debian, Ubuntu), or librdmacm (Fedora, RHEL)",
}
_POINTER = c_void_p  # objects of the libraries go by address

# Result, and arguments, of what is called. A result of POINTER or _FAILS tells its error in errno; one of _ERRNO is it,
# and one of _COUNT if it is negative.
_FAILS: Final = "-1 and errno"
_ERRNO: Final = "an errno"
_COUNT: Final = c_ssize_t
_VERBS_CALLS: Final[dict[str, tuple[Any, ...]]] = {
    "ibv_fork_init": (_ERRNO,),
    "ibv_get_device_list": (_POINTER, POINTER(c_int)),
    "ibv_free_device_list": (None, _POINTER),
    "ibv_open_device": (_POINTER, _POINTER),
    "ibv_close_device": (_FAILS, _POINTER),
    "ibv_query_device": (_ERRNO, _POINTER, POINTER(abi.DeviceAttr)),
    "ibv_query_port": (_ERRNO, _POINTER, c_uint8, POINTER(abi.PortAttr)),
    "_ibv_query_gid_ex": (_ERRNO, _POINTER, c_uint32, c_uint32, POINTER(abi.GidEntry), c_uint32, c_size_t),
    "_ibv_query_gid_table": (_COUNT, _POINTER, POINTER(abi.GidEntry), c_size_t, c_uint32, c_size_t),
    "ibv_get_async_event": (_FAILS, _POINTER, POINTER(abi.AsyncEventRecord)),
    "ibv_ack_async_event": (None, POINTER(abi.AsyncEventRecord)),
    "ibv_alloc_pd": (_POINTER, _POINTER),
    "ibv_dealloc_pd": (_ERRNO, _POINTER),
    "ibv_reg_mr": (POINTER(abi.Mr), _POINTER, _POINTER, c_size_t, c_int),
    "ibv_dereg_mr": (_ERRNO, POINTER(abi.Mr)),
    "ibv_create_comp_channel": (POINTER(abi.CompChannel), _POINTER),
    "ibv_destroy_comp_channel": (_ERRNO, POINTER(abi.CompChannel)),
    "ibv_create_cq": (_POINTER, _POINTER, c_int, _POINTER, POINTER(abi.CompChannel), c_int),
    "ibv_resize_cq": (_ERRNO, _POINTER, c_int),
    "ibv_destroy_cq": (_ERRNO, _POINTER),
    "ibv_get_cq_event": (_FAILS, POINTER(abi.CompChannel), POINTER(c_void_p), POINTER(c_void_p)),
    "ibv_ack_cq_events": (None, _POINTER, c_uint32),
    "ibv_create_srq": (_POINTER, _POINTER, POINTER(abi.SrqInitAttr)),
    "ibv_modify_srq": (_ERRNO, _POINTER, POINTER(abi.SrqAttr), c_int),
    "ibv_destroy_srq": (_ERRNO, _POINTER),
    "ibv_create_ah": (_POINTER, _POINTER, POINTER(abi.AhAttr)),
    "ibv_destroy_ah": (_ERRNO, _POINTER),
    "ibv_create_qp": (POINTER(abi.Qp), _POINTER, POINTER(abi.QpInitAttr)),
    "ibv_modify_qp": (_ERRNO, POINTER(abi.Qp), POINTER(abi.QpAttr), c_int),
    "ibv_destroy_qp": (_ERRNO, POINTER(abi.Qp)),
}
_CM_CALLS: Final[dict[str, tuple[Any, ...]]] = {
    "rdma_create_event_channel": (POINTER(abi.EventChannel),),
    "rdma_destroy_event_channel": (None, POINTER(abi.EventChannel)),
    "rdma_create_id": (_FAILS, POINTER(abi.EventChannel), POINTER(POINTER(abi.CmId)), _POINTER, c_int),
    "rdma_destroy_id": (_FAILS, POINTER(abi.CmId)),
    "rdma_set_option": (_FAILS, POINTER(abi.CmId), c_int, c_int, _POINTER, c_size_t),
    "rdma_bind_addr": (_FAILS, POINTER(abi.CmId), c_char_p),
    "rdma_resolve_addr": (_FAILS, POINTER(abi.CmId), c_char_p, c_char_p, c_int),
    "rdma_resolve_route": (_FAILS, POINTER(abi.CmId), c_int),
    "rdma_init_qp_attr": (_FAILS, POINTER(abi.CmId), POINTER(abi.QpAttr), POINTER(c_int)),
    "rdma_connect": (_FAILS, POINTER(abi.CmId), POINTER(abi.ConnParam)),
    "rdma_establish": (_FAILS, POINTER(abi.CmId)),
    "rdma_listen": (_FAILS, POINTER(abi.CmId), c_int),
    "rdma_accept": (_FAILS, POINTER(abi.CmId), POINTER(abi.ConnParam)),
    "rdma_reject": (_FAILS, POINTER(abi.CmId), c_char_p, c_uint8),
    "rdma_notify": (_FAILS, POINTER(abi.CmId), c_int),
    "rdma_disconnect": (_FAILS, POINTER(abi.CmId)),
    "rdma_get_cm_event": (_FAILS, POINTER(abi.EventChannel), POINTER(POINTER(abi.CmEvent))),
    "rdma_ack_cm_event": (_FAILS, POINTER(abi.CmEvent)),
    "rdma_get_src_port": (c_uint16, POINTER(abi.CmId)),
}
_NO_ROOM: Final = frozenset({errno.ENOMEM, errno.EAGAIN, errno.ENOSPC, errno.EMFILE})
_NO_MEMORY: Final = (errno.ENOMEM, errno.EAGAIN)  # what more than RLIMIT_MEMLOCK is told by


class Libraries:
    """The functions of both, by their names; each raises OSError where the library tells an error."""

    def __init__(self) -> None:
        verbs = _load(_VERBS)
        manager = _load(_CM)
        self._functions = _bound(verbs, _VERBS_CALLS, _VERBS) | _bound(manager, _CM_CALLS, _CM)

    def __getattr__(self, name: str) -> Any:
        try:
            function = self.__dict__["_functions"][name]
        except KeyError:
            raise AttributeError(name) from None
        setattr(self, name, function)
        return function


@cache
def libraries() -> Libraries:
    """Both of them; raises Unavailable with the package that is missing."""
    found = Libraries()
    try:
        found.ibv_fork_init()
    except OSError as error:
        raise Unavailable(
            f"registered memory cannot be kept from children of this process: {error.strerror}",
            remedy="open the device before any memory is registered",
        ) from error
    return found


def told(error: OSError, what: str) -> SidestepError:
    """What a failed call of the libraries means to the caller: a bound that is reached, or something unavailable."""
    text = f"{what}: {error.strerror}"
    if error.errno in _NO_ROOM:
        remedy = "'sidestep doctor' tells how to raise the limit of locked memory" if error.errno in _NO_MEMORY else ""
        return LimitReached(text, remedy=remedy)
    return Unavailable(text)


def _load(name: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(name, use_errno=True)
    except OSError as error:
        raise Unavailable(f"{name} cannot be loaded: {error}", remedy=f"install {PACKAGES[name]}") from error


def _bound(library: ctypes.CDLL, calls: dict[str, tuple[Any, ...]], name: str) -> dict[str, Any]:
    functions: dict[str, Any] = {}
    for call, (result, *arguments) in calls.items():
        try:
            function = getattr(library, call)
        except AttributeError as error:
            raise Unavailable(f"{name} has no {call}", remedy=f"install a newer {PACKAGES[name]}") from error
        function.argtypes = arguments
        function.restype = c_int if result in (_FAILS, _ERRNO) else result
        if result is _FAILS:
            function.errcheck = _raise_minus_one
        elif result is _ERRNO:
            function.errcheck = _raise_result
        elif result is _COUNT:
            function.errcheck = _raise_negative
        elif result is not None and result is not c_uint16:
            function.errcheck = _raise_null
        functions[call] = function
    return functions


def _raise_minus_one(result: int, function: Any, arguments: Any) -> int:
    del function, arguments
    if result:
        raise _error(0)
    return result


def _raise_result(result: int, function: Any, arguments: Any) -> int:
    del function, arguments
    if result:
        # Most return the errno, some -1, and some the negative errno (a library and its drivers are not of one mind).
        raise _error(0 if result == -1 else abs(result))
    return result


def _raise_negative(result: int, function: Any, arguments: Any) -> int:
    del function, arguments
    if result < 0:
        raise _error(-result)
    return result


def _raise_null(result: Any, function: Any, arguments: Any) -> Any:
    del function, arguments
    if not result:
        raise _error(0)
    return result


def _error(number: int) -> OSError:
    """The error of this number, or of errno, which is cleared: some drivers leave what was there before."""
    number = number or ctypes.get_errno()
    ctypes.set_errno(0)
    return OSError(number, os.strerror(number) if number else "the driver does not say why")


__all__ = ["PACKAGES", "Libraries", "libraries", "told"]
