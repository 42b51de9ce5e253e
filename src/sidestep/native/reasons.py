"""Remedies for reasons: one sentence each, beside the sentence of `layout.REASON_TEXT` that gives the reason.

A remedy names the one command, option or policy line that would change it, or says that nothing would, and why. The end
that carries the reason is "this program", the other one "the other end".
"""

from __future__ import annotations

from typing import Final

from sidestep.native.layout import REASON_TEXT, Reason, Refusal

_NO_NEED: Final = "nothing to do: "

# The options that can be a reason by themselves, by level and name (asm-generic/socket.h, linux/tcp.h).
_OPTIONS: Final = {
    (1, 10): "SO_OOBINLINE", (1, 29): "SO_TIMESTAMP", (1, 35): "SO_TIMESTAMPNS", (1, 37): "SO_TIMESTAMPING",
    (1, 42): "SO_PEEK_OFF", (1, 60): "SO_ZEROCOPY", (1, 63): "SO_TIMESTAMP", (1, 64): "SO_TIMESTAMPNS",
    (1, 65): "SO_TIMESTAMPING", (6, 19): "TCP_REPAIR", (6, 30): "TCP_FASTOPEN_CONNECT or MSG_FASTOPEN",
    (6, 31): "TCP_ULP", (6, 35): "TCP_ZEROCOPY_RECEIVE",
}  # fmt: skip
_BY_OPTION: Final = {Reason.UNUSUAL_OPTION, Reason.URGENT_DATA, Reason.KERNEL_TLS}

REMEDY: Final[dict[Reason, str]] = {
    Reason.NONE: "",
    Reason.YOUNG: "start both ends with 'sidestep run', with '--promote-after 0' to promote at once",
    Reason.WAITING_FOR_PEER: _NO_NEED + "it is promoted when the other end next sends, reads or waits",
    Reason.PEER_ABSENT: "start the other end with 'sidestep run', too",
    Reason.NO_PROVIDER: "sidestep provider start",
    Reason.PROVIDER_LAYOUT: "restart whichever is older, the provider ('sidestep provider stop') or the program",
    Reason.REMOTE: "name its host with 'sidestep provider start --remote' here, and this one there; or run both ends "
    "on one host",
    Reason.COUNT_MISMATCH: "switch off what moves bytes past the C library (io_uring, system calls of its own)",
    Reason.URGENT_DATA: "do without MSG_OOB and SO_OOBINLINE; urgent data has no place in a ring",
    Reason.KERNEL_TLS: "switch kernel TLS off in this program, such as OpenSSL's 'Options = -KTLS'",
    Reason.PASSED: "start the program that receives the socket with 'sidestep run', too, or let it accept by itself",
    Reason.INHERITED: _NO_NEED + "it is promoted once no other process holds it; SOCK_CLOEXEC would keep it from "
    "programs that are started",
    Reason.EPOLL_UNSUPPORTED: "let each process keep an epoll set of its own",
    Reason.STDIO: "let the program read and write the socket by send() and recv() instead of C stdio",
    Reason.NO_RESOURCES: "raise 'ulimit -n' for this program, or 'sidestep provider start --budget' or "
    "--remote-pinned; or use a smaller 'sidestep run --ring-size'",
    Reason.PEER_VIOLATION: "look at the other end: it wrote into shared memory what no shim writes",
    Reason.REFUSED_BY_PROVIDER: "sidestep provider status: its offer_refused counters name the reason",
    Reason.WAITER_IN_KERNEL: _NO_NEED + "it is promoted when that call returns",
    Reason.UNUSUAL_OPTION: "do without the socket option, or read the notifications of SO_ZEROCOPY by MSG_ERRQUEUE",
    Reason.ASYNC_SIGNAL_IO: "let the program wait by poll or epoll instead of SIGIO",
    Reason.ASYNC_IO: "let the program use recv() and send() instead of aio_read(), aio_write() or io_submit()",
    Reason.UNCOVERED: _NO_NEED + "TCP is what is safe then",
    Reason.SANDBOX: "switch the program's sandbox off, if you trust it without",
    Reason.IO_URING: "switch io_uring off in this program; or, if none of its rings has a socket, write a line "
    "'rings files PROGRAM' into the policy",
    Reason.PEER_LEFT: "explain the other end: its own reason says why it went back",
    Reason.UNHEARD: "let the programs read what they are sent; where a direction has ended, the other stays on TCP",
    Reason.POLICY: "change the first line of the policy that matches it; 'sidestep policy test' names that line",
    Reason.DEMOTED: "sidestep promote ADDRESS:PORT",
    Reason.DIRECT: "open it as AF_INET or AF_INET6, or as AF_INET_OFFLOAD with IPPROTO_OFFLOAD_ANY",
    Reason.FOREIGN_USER: "run both ends as one user, or write a line 'pair USER USER' into the policy",
    Reason.BY_SDP: _NO_NEED + "a rule of the policy or the program itself asks for SDP; 'use both' begins with TCP",
    Reason.RELAY_LOST: "look why it ended: 'sidestep provider status' counts relay_reset by reason",
    Reason.LATENCY: _NO_NEED + "it is looked at anew each second; 'sidestep provider start --remote-promote always' "
    "carries it whatever it does",
    Reason.CROWDED: "start both hosts' providers with a larger 'sidestep provider start --remote-connections'; it "
    "stays on TCP until it is opened anew",
    Reason.NO_PROTOCOL: "install or add an offload protocol that can: 'sidestep provider modules' lists them",
}


# Settings by which programs do without an io_uring, by the beginning of their names.
_WITHOUT_RING: Final = {
    "ceph-osd": "bdev_ioring = false", "mariadbd": "--innodb-use-native-aio=0", "mysqld": "--innodb-use-native-aio=0",
    "postgres": "io_method = worker", "qemu-": "aio=threads", "smbd": "no io_uring among 'vfs objects'",
}  # fmt: skip


def remedy(reason: Reason, program: str) -> str:
    """The remedy of a reason that a program's connection has; for some it names the program's own setting."""
    for name, setting in _WITHOUT_RING.items():
        if reason is Reason.IO_URING and program.startswith(name):
            return f"switch io_uring off in this program: {setting}"
    return REMEDY[reason].replace("PROGRAM", program or "PROGRAM")


def why(reason: Reason, option: tuple[int, int] = (0, 0)) -> str:
    """The reason as a sentence; `option`: level and name of the socket option that gave it, if it was one."""
    if reason not in _BY_OPTION or not option[1]:
        return REASON_TEXT[reason]
    return f"{REASON_TEXT[reason]}: {_OPTIONS.get(option, f'option {option[1]} of level {option[0]}')} was set"


REFUSAL_TEXT: Final[dict[Refusal, str]] = {
    Refusal.NO_OFFER: "no program had offered that connection, or the offer had expired",
    Refusal.EXPIRED: "no claim came in time: the other end is not under sidestep, or idle",
    Refusal.NOT_PROVEN: "the kernel knows no such socket of that process",
    Refusal.FOREIGN_NETNS: "the program is in a network namespace that the provider cannot look into",
    Refusal.TOO_MANY: "too many offers were pending",
    Refusal.NO_BUDGET: "the budget for channels, or for connections over RDMA devices, was used up",
    Refusal.POLICY: "the policy keeps the connection on TCP, or with a protocol that cannot carry it",
    Refusal.DUPLICATE: "the same connection had been offered or claimed already",
    Refusal.FOREIGN_USER: "the other end is another user's, and the policy does not pair the two",
    Refusal.SHUTTING_DOWN: "the provider was about to leave",
    Refusal.NO_PROTOCOL: "no offload protocol can carry the connection",
    Refusal.PROTOCOL_FAILED: "the offload protocol that was to carry the connection did not",
    Refusal.LATENCY: "TCP is faster for what the connection did",
}
