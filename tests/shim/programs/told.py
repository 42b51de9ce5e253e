"""One end of a connection that does what it is told: each line on stdin is evaluated, and the result printed.

`serve()` listens and gives the port, `accept()` or `connect(port)` makes `s`, or `near` if it is named. An error is
printed by its name.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import fcntl
import os
import select
import socket
import sys
import termios
import threading
import time
from collections.abc import Callable

s = socket.socket()
near = socket.socket()
listeners: dict[str, socket.socket] = {}


def serve(name: str = "s", address: str = "127.0.0.1") -> int:
    """Listens for one of the two."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listeners[name] = socket.create_server((address, 0), family=family)
    port: int = listeners[name].getsockname()[1]
    return port


def accept(name: str = "s") -> None:
    """Takes the connection."""
    globals()[name] = listeners[name].accept()[0]


def connect(port: int, name: str = "s", address: str = "127.0.0.1") -> None:
    """Makes it."""
    if ":" in address:
        globals()[name] = socket.socket(socket.AF_INET6)
    globals()[name].connect((address, port))


def get(count: int, name: str = "s") -> bytes:
    """So many bytes, or fewer if they end before."""
    data = b""
    while len(data) < count and (part := globals()[name].recv(count - len(data))):
        data += part
    return data


def queued() -> int:
    """What FIONREAD counts."""
    count = array.array("i", [0])
    fcntl.ioctl(s, termios.FIONREAD, count)
    return count[0]


def get_queued() -> int:
    """Reads what is there, as FIONREAD counts it, and makes no call that would meet the end; the number of bytes."""
    got = 0
    while count := queued():
        got += len(s.recv(count))
    return got


def put_until_full() -> int:
    """Sends what can be sent without waiting; the number of bytes."""
    sent = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            sent += s.send(b"f" * 65536, socket.MSG_DONTWAIT)
    return sent


def polled(seconds: float) -> list[int]:
    """What poll and epoll tell of the end."""
    poller, epoll = select.poll(), select.epoll()
    poller.register(s, 0)
    with epoll:
        epoll.register(s, select.EPOLLRDHUP)
        return [event for _, event in [*poller.poll(1000 * seconds), *epoll.poll(seconds)]]


passed: list[int] = []


def send_on() -> None:
    """Sends byte by byte until it may not."""
    while True:
        passed.append(s.send(b"z"))


def pass_on() -> None:
    """Gives the connection to somebody who has no part in sidestep, and closes it."""
    one, other = socket.socketpair(socket.AF_UNIX)
    socket.send_fds(one, [b"x"], [s.fileno()])
    s.close()
    passed.extend(socket.recv_fds(other, 1, 1)[1])


def given() -> bytes:
    """All that he reads."""
    data = b""
    with socket.socket(fileno=passed.pop()) as his:
        while part := his.recv(4096):
            data += part
    return data


def arrived(count: int, one: socket.socket | None = None) -> bool:
    """Waits until so many bytes can be read, as FIONREAD counts them, and makes no other call."""
    queued = array.array("i", [0])
    while queued[0] < count:
        fcntl.ioctl(one or s, termios.FIONREAD, queued)
    return queued[0] == count


watched: select.epoll


def watch() -> None:
    """Puts the connections into a set."""
    global watched
    watched = select.epoll()
    watched.register(s, select.EPOLLIN)
    watched.register(near, select.EPOLLIN)


def looked() -> int:
    """Looks at the set until something is ready, and a few times more; never waits. How many are."""
    while not watched.poll(0):
        pass
    for _ in range(1000):
        found = watched.poll(0)
    return len(found)


def near_waits() -> bytes:
    """A byte of that one."""
    return near.recv(1)


def near_polled() -> object:
    """Waits for that one."""
    poller = select.poll()
    poller.register(near, select.POLLIN)
    poller.poll()
    return near.recv(1)


def s_polled() -> object:
    """Waits for a byte of the first."""
    poller = select.poll()
    poller.register(s, select.POLLIN)
    poller.poll()
    return s.recv(1)


def s_watched() -> object:
    """The same, in a set."""
    with select.epoll() as epoll:
        epoll.register(s, select.EPOLLIN)
        epoll.poll()
        return s.recv(1)


def waited(how: str, events: int, seconds: int) -> object:
    """What is told of the connection meanwhile."""
    waiting = {"select.poll": select.poll, "select.epoll": select.epoll}[how]()
    waiting.register(s, events)
    return waiting.poll(1000 * seconds if how == "select.poll" else seconds)


def waited_twice(how: str, events: int) -> object:
    """What each of two looks tells."""
    waiting = {"select.poll": select.poll, "select.epoll": select.epoll}[how]()
    waiting.register(s, events)
    found = [waiting.poll(0.1), waiting.poll(1)]
    return [told[0][1] if told else 0 for told in found]


def polled_for_a_nanosecond(events: int) -> int:
    """What ppoll tells if its time is over before it can sleep, as on a busy machine that of any short one."""
    fds = (ctypes.c_int * 2)(s.fileno(), events)  # events and revents are the halves of the second
    ctypes.CDLL(None).ppoll(fds, ctypes.c_ulong(1), (ctypes.c_long * 2)(0, 1), None)
    return fds[1] >> 16


class Later:
    """A call in a thread of its own."""

    last: Later

    def __init__(self, call: Callable[[], object]) -> None:
        self._call, self._result = call, "no result"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @staticmethod
    def of(call: Callable[[], object]) -> None:
        """Begins the call; `last` names it."""
        Later.last = Later(call)

    def _run(self) -> None:
        self._result = tried(self._call)

    def waits(self, seconds: float) -> bool:
        """Whether it has not returned after so long."""
        self._thread.join(seconds)
        return self._thread.is_alive()

    def result(self) -> str:
        """What it gave, when it has."""
        self._thread.join()
        return self._result


slow: list[int] = []


def later(call: Callable[[], object]) -> object:
    """The call in a thread that gets a processor only when no other wants it, until `hurry()`."""
    slow.append(threading.get_native_id())
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    return call()


def hurry() -> None:
    """Ends that."""
    while slow:
        os.sched_setscheduler(slow.pop(), os.SCHED_OTHER, os.sched_param(0))


def tried(call: Callable[[], object]) -> str:
    """What a call gives, or the name of its errno."""
    try:
        return repr(call())
    except OSError as error:
        return errno.errorcode[error.errno or 0]


def timed(call: Callable[[], object]) -> float:
    """How many seconds a call takes."""
    start = time.monotonic()
    tried(call)
    return time.monotonic() - start


if __name__ == "__main__":
    for told in iter(sys.stdin.readline, ""):
        print(tried(lambda told=told: eval(told)), flush=True)  # type: ignore[misc]
