"""What to do about a reason: one sentence each, beside the sentence of `layout.REASON_TEXT` that says what it is.

A remedy names the one command, option or policy line that would change it, or says that nothing would, and why. It
speaks of the end that carries the reason as "this program", of the other one as "the other end".
"""

from __future__ import annotations

from typing import Final

from sidestep.native.layout import Reason, Refusal

_NO_NEED: Final = "nothing to do: "

REMEDY: Final[dict[Reason, str]] = {
    Reason.NONE: "",
    Reason.YOUNG: "start both ends with 'sidestep run', with '--promote-after 0' to promote at once",
    Reason.WAITING_FOR_PEER: _NO_NEED + "it is promoted when the other end next sends, reads or waits",
    Reason.PEER_ABSENT: "start the other end with 'sidestep run', too",
    Reason.NO_PROVIDER: "sidestep provider start",
    Reason.REMOTE: "name its host with 'sidestep provider start --remote' here, and this one there; or run both ends "
    "on one host",
    Reason.COUNT_MISMATCH: "switch off what moves bytes past the C library (io_uring, system calls of its own)",
    Reason.URGENT_DATA: "do without MSG_OOB and SO_OOBINLINE; urgent data has no place in a ring",
    Reason.KERNEL_TLS: "switch kernel TLS off in this program, such as OpenSSL's 'Options = -KTLS'",
    Reason.FAST_OPEN: "switch TCP Fast Open off in this program",
    Reason.PASSED: "start the program that receives the socket with 'sidestep run', too, or let it accept by itself",
    Reason.SHARED_BY_FORK: _NO_NEED + "it is promoted once a single process holds the socket",
    Reason.EPOLL_UNSUPPORTED: "let each process keep an epoll set of its own, neither nested nor EPOLLEXCLUSIVE",
    Reason.STDIO: "let the program read and write the socket by send() and recv() instead of C stdio",
    Reason.NO_RESOURCES: "raise 'ulimit -n' for this program, or 'sidestep provider start --budget'; or use a smaller "
    "'sidestep run --ring-size'",
    Reason.PEER_LAYOUT: "restart both ends under the same version of sidestep",
    Reason.PEER_VIOLATION: "look at the other end: it wrote into shared memory what no shim writes",
    Reason.REFUSED_BY_PROVIDER: "sidestep provider status: its offer_refused counters name the reason",
    Reason.WAITER_IN_KERNEL: _NO_NEED + "it is promoted when that call returns",
    Reason.UNUSUAL_OPTION: "do without the socket option, such as SO_TIMESTAMP, SO_PEEK_OFF or TCP_REPAIR",
    Reason.ASYNC_SIGNAL_IO: "let the program wait by poll or epoll instead of SIGIO or POSIX asynchronous I/O",
    Reason.IO_URING: "switch io_uring off in this program",
    Reason.PEER_LEFT: "explain the other end: its own reason says why it went back",
    Reason.UNHEARD: "let the programs read what they are sent; where a direction has ended, the other stays on TCP",
    Reason.POLICY: "change the first line of the policy that matches it; 'sidestep policy test' names that line",
    Reason.DEMOTED: "sidestep promote ADDRESS:PORT",
    Reason.DIRECT: "open it as AF_INET or AF_INET6, or as AF_INET_OFFLOAD with IPPROTO_OFFLOAD_ANY",
    Reason.FOREIGN_USER: "run both ends as one user, or write a line 'pair USER USER' into the policy",
    Reason.BY_SDP: _NO_NEED + "a rule of the policy or the program itself asks for SDP; 'use both' begins with TCP",
    Reason.RELAY_LOST: "look why it ended: 'sidestep provider status' counts relay_reset by reason",
    Reason.NO_PROTOCOL: "install or add an offload protocol that can: 'sidestep provider modules' lists them",
}

REFUSAL_TEXT: Final[dict[Refusal, str]] = {
    Refusal.NO_OFFER: "nobody had offered that connection, or the offer had expired",
    Refusal.EXPIRED: "no claim came in time: the other end is not under sidestep, or idle",
    Refusal.NOT_PROVEN: "the kernel knows no such socket of that process",
    Refusal.FOREIGN_NETNS: "the program is in a network namespace that the provider cannot look into",
    Refusal.TOO_MANY: "too many offers were pending",
    Refusal.NO_BUDGET: "the budget for channel memory was used up",
    Refusal.POLICY: "the policy keeps the connection on TCP, or with a protocol that cannot carry it",
    Refusal.DUPLICATE: "the same connection had been offered or claimed already",
    Refusal.FOREIGN_USER: "the other end is another user's, and the policy does not pair the two",
    Refusal.SHUTTING_DOWN: "the provider was about to leave",
    Refusal.NO_PROTOCOL: "no offload protocol can carry the connection",
    Refusal.PROTOCOL_FAILED: "the offload protocol that was to carry the connection did not",
}
