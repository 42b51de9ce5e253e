"""The one definition of every record that C and Python share.

Python reads these tables directly. The build writes ``layout.h`` from them (``header.py``), with the same structs, each
field held in place by a ``static_assert``. The records are:
"""

from __future__ import annotations

import struct
from enum import IntEnum, IntFlag
from typing import Any, Final, NamedTuple

LAYOUT_VERSION: Final = 9
# Versions that a provider serves, so that it can be replaced while programs run. Since the oldest, only words and bits
# have been added that were zero before. A program that does not know them works without.
LAYOUTS: Final = range(7, LAYOUT_VERSION + 1)
RPC_MAGIC: Final = 0x53445331  # "SDS1"
REGISTRY_BUCKETS: Final = 4096  # power of two; one word per hash of a four-tuple
REGISTRY_BUCKETS_OFFSET: Final = 4096
REGISTRY_SIZE: Final = REGISTRY_BUCKETS_OFFSET + 4 * REGISTRY_BUCKETS
ARENA_SLOTS_OFFSET: Final = 4096
ARENA_SLOTS_MAX: Final = 65536  # per process family; a connection beyond it stays on TCP, uncounted
ARENA_MAGIC: Final = 0x53444131  # "SDA1"
CHANNEL_ROUNDS: Final = (1 << 30) - 1  # a direction stays on TCP after so many
HOLDER_STRANGER: Final = 1 << 31  # bit in holder_pids: the process holds the socket, and its program reads no ring
SLOT_RELAY_OVER: Final = 1 << 22  # flag of a slot: the provider between has left, no further round is possible
DOORBELLS_PER_PAGE: Final = 64  # one 64-byte line each
# Bytes behind each ring, for unread data: more than kernel TCP holds (tcp_wmem, tcp_rmem). They cost nothing untouched.
CHANNEL_SPILL: Final = 16 << 20
GAIN_MIN_NS: Final = 1_000_000  # less is not worth the way to another host

# Arguments of socket(): families that no kernel assigns (AF_MAX is below 64), in 16 bits; a protocol of no IP header.
AF_INET_OFFLOAD: Final = 0x5344  # "SD"
AF_INET6_OFFLOAD: Final = 0x5345
AF_INET_DIRECT: Final = 0x5346
AF_INET6_DIRECT: Final = 0x5347
IPPROTO_SDP: Final = 0x534450  # "SDP"
IPPROTO_OFFLOAD_ANY: Final = 0  # IPPROTO_IP, the wildcard: any offload protocol, or TCP
EXPLICIT_NUMBERS: Final = (
    "AF_INET_OFFLOAD", "AF_INET6_OFFLOAD", "AF_INET_DIRECT", "AF_INET6_DIRECT", "IPPROTO_SDP", "IPPROTO_OFFLOAD_ANY",
)  # fmt: skip

# The engine's part of the wire: one SDP message, with the base header below, and two words of a link.
SDP_DATA: Final = 0xFF
LINK_DATA: Final = 4
LINK_READ: Final = 5

# A provider that stands in for another host connects from 127.83.68.80 ("SDP"). A shim asks it for the true addresses.
TRANSLATED_ADDRESS: Final = 0x7F534450
TRANSLATED_MASK: Final = 0xFFFFFF00


class Rpc(IntEnum):
    """Type of an RPC message between a shim (or a command) and the provider."""

    HELLO = 1  # shim -> provider; fds: [arena, opened read-only]
    WELCOME = 2  # provider -> shim; fds: [registry, read-only]
    OFFER = 3  # connecting shim -> provider; fds: [segment, doorbell eventfd, doorbell page]
    CLAIM = 4  # accepting shim -> provider; fds: [doorbell eventfd, doorbell page]
    ATTACH = 5  # provider -> claimer; fds: [segment, doorbell eventfd, doorbell page] of the offerer
    CLAIMED = 6  # provider -> offerer; fds: [doorbell eventfd, doorbell page] of the claimer
    REFUSED = 7  # provider -> either; `reason` says why
    WITHDRAW = 8  # shim -> provider: the offer with this token is off
    CONTROL = 9  # command -> provider; a JSON document follows the record in the same packet
    CONTROL_REPLY = 10  # provider -> command; a piece of a JSON document follows; flags & 1: more pieces follow
    DEMOTE = 11  # provider -> shim: the connection in this slot of that `arena_id` goes back to TCP, and stays
    PROMOTE = 12  # provider -> shim: it may be promoted again, unless something keeps it on TCP for good
    ASK = 13  # shim -> provider, which answers at once: what an explicit socket wants to do; `flags` is an Ask
    ANSWER = 14  # provider -> shim; `error`: errno that the call fails with; `reason`: a Refusal, so go on natively
    LAYOUT = 15  # provider -> shim, of any version of the record: it does not serve the shim's layout
    # A message of either kind: shim -> provider -> shims of the family that its peers know by `arena_id` (see
    # `family_id`). The other end of the connection in that slot (`token`, as of DEMOTE) has another doorbell; `cookie`:
    # the `doorbell_nonce` of its side. fds: [doorbell eventfd, its page]. To a provider between, whose doorbell is
    # `arena_id`: `token` is its `hint`, and `flags` are Doorbells.
    NEW_DOORBELL = 16
    # The end of that `segment_id` has been asked for TCP and does not answer, as it may wait on something else.
    SERVE = 17
    JOIN = 18  # shim -> provider; fds: [arena, opened read-only]: it holds connections of that family, too, given to it
    LEAVE = 19  # the sender holds it no more


class Welcome(IntFlag):
    """Descriptors and messages that the provider wants beside the record (the `flags` of `Rpc.WELCOME`)."""

    POSSESSION = 1  # OFFER and CLAIM bring a duplicate of the TCP socket as their first descriptor
    PATH = 2  # and after it a UDP socket bound to the connection's local address, for the proof across namespaces
    REMOTE = 4  # connections with other hosts can be carried: they are offered and claimed as well
    SERVES = 8  # SERVE is passed on
    NEW_DOORBELLS = 16  # NEW_DOORBELL is passed on
    JOINS = 32  # JOIN and LEAVE are understood
    FILE_RINGS = 64  # the policy says that the program's io_urings have no sockets


class Attach(IntFlag):
    """Kind of the channel's other end (the `flags` of `Rpc.ATTACH` and `Rpc.CLAIMED`)."""

    RELAYED = 1  # the provider itself; one more descriptor, the last: a pipe that hangs up when the provider dies


class Doorbells(IntFlag):
    """Doorbells of one end (the `flags` of `Rpc.NEW_DOORBELL` to a provider between)."""

    ALONE = 1  # the only one, unless another has been named since (`doorbell_nonce`): all others are no more


class Ask(IntEnum):
    """Request of an explicit socket (the `flags` of `Rpc.ASK`)."""

    BIND = 1  # local_addr:local_port for the protocols, too; fds: [the native socket, a pipe whose end releases it]
    LISTEN = 2  # the socket listens there
    # Request to remote_addr:remote_port; fds: none, or [the native socket], so that a protocol can open the connection
    # in TCP's place. An ANSWER with a remote_port names the place to which that socket is to connect.
    CONNECT = 3
    OPEN = 4  # is there a protocol of that number, for this family? local_addr is the unspecified address
    ADDRESSES = 5  # the true addresses of a connection with the provider; fds: [the native socket]


class Refusal(IntEnum):
    """Reason for refusing an offer or a claim (the `reason` of `Rpc.REFUSED`)."""

    NO_OFFER = 1  # no program offered that connection (a hash collision, or the offer expired)
    EXPIRED = 2  # no claim came in time: the other end is idle, or not under sidestep
    NOT_PROVEN = 3  # the kernel knows no such socket of that cookie and addresses
    FOREIGN_NETNS = 4  # the caller is in a network namespace the provider cannot look into
    TOO_MANY = 5  # this client has too many offers pending
    NO_BUDGET = 6  # the budget for channels, or for connections over RDMA devices, is used up
    POLICY = 7  # the policy keeps the connection on TCP, or with a protocol that cannot carry it
    DUPLICATE = 8  # the same connection has been offered or claimed already
    FOREIGN_USER = 9  # the other end is another user's, and the policy does not pair the two
    SHUTTING_DOWN = 10
    NO_PROTOCOL = 11  # no offload protocol can carry it
    PROTOCOL_FAILED = 12  # the offload protocol that was to carry it did not
    LATENCY = 13  # the way to the other host would be slower than TCP for what the connection does


class State(IntEnum):
    """State of a tracked connection, as `sidestep ss` shows it."""

    FREE = 0  # the slot is unused
    NATIVE = 1  # plain TCP; may still be promoted
    OFFERED = 2  # an offer or a claim is with the provider
    ATTACHED = 3  # both ends hold the channel; directions are switching
    PROMOTED = 4  # both directions use the rings
    PINNED = 5  # plain TCP, for the `reason`: for good or, after a promotion, until both ends agree again


class Reason(IntEnum):
    """Reason for a connection's state. One sentence each in `REASON_TEXT`. No number is given twice."""

    NONE = 0
    YOUNG = 1
    WAITING_FOR_PEER = 2
    PEER_ABSENT = 3
    NO_PROVIDER = 4
    REMOTE = 5
    COUNT_MISMATCH = 6
    URGENT_DATA = 7
    KERNEL_TLS = 8
    PASSED = 11
    EPOLL_UNSUPPORTED = 13
    STDIO = 14
    NO_RESOURCES = 15
    PEER_VIOLATION = 17
    REFUSED_BY_PROVIDER = 18
    WAITER_IN_KERNEL = 20
    UNUSUAL_OPTION = 22
    ASYNC_SIGNAL_IO = 23
    PEER_LEFT = 24
    UNHEARD = 25
    POLICY = 26
    DEMOTED = 27
    DIRECT = 28
    FOREIGN_USER = 29
    RELAY_LOST = 30
    NO_PROTOCOL = 36
    BY_SDP = 37
    IO_URING = 38
    INHERITED = 39
    ASYNC_IO = 40
    PROVIDER_LAYOUT = 41
    SANDBOX = 42
    LATENCY = 43
    UNCOVERED = 44
    CROWDED = 45

    @classmethod
    def _missing_(cls, value: object) -> Reason | None:
        """Reason in whose place a shim of an earlier version writes another number."""
        merged: dict[object, Reason] = {9: cls.UNUSUAL_OPTION, 12: cls.INHERITED, 16: cls.PEER_VIOLATION}
        return merged.get(value)


REASON_TEXT: Final[dict[Reason, str]] = {
    Reason.NONE: "",
    Reason.YOUNG: "the connection has not exchanged enough to be worth a channel, or the other end has offered none",
    Reason.WAITING_FOR_PEER: "offered; the other end has not answered: it is idle, or not under sidestep",
    Reason.PEER_ABSENT: "the other end has not joined in: it is not under sidestep, keeps to TCP, or is idle",
    Reason.NO_PROVIDER: "no provider answers; start one with 'sidestep provider start'",
    Reason.PROVIDER_LAYOUT: "the provider is of a version of sidestep that does not serve this program's",
    Reason.REMOTE: "the other end is not on this host",
    Reason.COUNT_MISMATCH: "the kernel counted other bytes than the shim: some calls bypass it",
    Reason.URGENT_DATA: "the program uses urgent (out-of-band) data",
    Reason.KERNEL_TLS: "kernel TLS is attached to the socket",
    Reason.PASSED: "the socket was passed between processes",
    Reason.EPOLL_UNSUPPORTED: "the epoll set is shared or unknown, or holds a closed descriptor",
    Reason.STDIO: "C stdio reads or writes the socket inside libc",
    Reason.NO_RESOURCES: "no memory or descriptors were left for a channel, or for its way to the other host",
    Reason.PEER_VIOLATION: "the other end broke the channel's rules; the connection was reset, or stays on TCP",
    Reason.REFUSED_BY_PROVIDER: "the provider refused the offer",
    Reason.WAITER_IN_KERNEL: "a thread sits in a kernel call that would not notice the ring",
    Reason.UNUSUAL_OPTION: "a socket option is set that the shim cannot carry over",
    Reason.ASYNC_SIGNAL_IO: "the socket asks for SIGIO",
    Reason.UNHEARD: "the other end read nothing for a second, and by ring its death would go unnoticed",
    Reason.POLICY: "the policy keeps it on TCP",
    Reason.DEMOTED: "'sidestep demote' sent the connection back to TCP",
    Reason.DIRECT: "the socket was opened as AF_INET_DIRECT or AF_INET6_DIRECT, or as TCP by number",
    Reason.FOREIGN_USER: "the other end belongs to another user, and the policy does not pair the two",
    Reason.RELAY_LOST: "the relay between the two ends is gone, or lost bytes; the connection was reset",
    Reason.NO_PROTOCOL: "no offload protocol can carry it",
    Reason.BY_SDP: "bytes go by SDP, between the providers of the two hosts; TCP leads to the provider only",
    Reason.IO_URING: "the program has put the socket into an io_uring, or has a ring that the shim does not see into",
    Reason.SANDBOX: "the program has put itself under a seccomp filter, which may forbid what the shim does",
    Reason.ASYNC_IO: "asynchronous I/O has been asked for: its bytes are moved inside libc or the kernel",
    Reason.LATENCY: "TCP is faster for what it does now: it waits for answers, or moves large pieces",
    Reason.UNCOVERED: "the program has made code, or a child in its memory, whose system calls the shim may not see",
    Reason.INHERITED: "another process holds the socket, too, or a program that was started here may",
    Reason.CROWDED: "the connection was idle, and its place on the device to the other host went to another one",
    Reason.PEER_LEFT: "the other end had to go back to TCP after the promotion",
}


class Notice(IntFlag):
    """Words from one side of a channel to the other beside the stream (`notice`)."""

    CLOSED = 1  # the last descriptor is being closed
    DEMOTE = 2  # send by TCP until I consent anew; I read the ring to its end first
    RECALL = 4  # send by TCP from now on, beginning with the ring's bytes from rx_frozen on
    RESET = 8  # word of a provider: bytes are lost, or the other end broke the rules; reset the connection
    OVER = 16  # last word of a provider: it answers nothing from now on, and holds no bytes
    CROWDED = 32  # word of a provider, with DEMOTE: its place goes to another connection
    LEAVE = 64  # word to a provider: back to TCP both ways; the way to me does not wait for the other application


class Seen(IntFlag):
    """End of the stream as a shim's native socket has shown it, for a provider between (`fin_seen`)."""

    END = 1  # all bytes of TCP have come
    RESET = 2  # and the socket is dead: reset, or timed out


class Knows(IntFlag):
    """Requests that a side of a channel understands (`knows`); a shim of an earlier layout understands none."""

    RING_ALWAYS = 1  # HINT_RING_ALWAYS in `hint`
    NEW_DOORBELL = 2  # Rpc.NEW_DOORBELL, and `slot`, `generation` and `family_id` are right
    DOORBELLS = 4  # a provider: Rpc.NEW_DOORBELL for one more doorbell of this connection
    LEAVE = 8  # a provider: Notice.LEAVE
    SPACER = 16  # a shim: `tx_spacer`


HINT_RING_ALWAYS: Final = 1 << 31  # bit of `hint`: ring at each publication, and do not look at the doorbell's word
NONCE_TAKEN: Final = 1  # bit of `doorbell_nonce`: the other side has taken the doorbell that was last named there
NONCE_COUNT: Final = (1 << 24) - 1  # doorbells named, in `doorbell_nonce` to a provider; the bits above prove it


class Acked(IntFlag):
    """Words of a shim that have reached the peer, by way of a provider between (`acked`)."""

    SWITCH = 1  # tx_switch_offset
    REQUEST = 2  # Notice.DEMOTE or Notice.RECALL
    READY = 4  # rx_ready; set before the peer gets it: without it nothing comes by ring
    RECALL = 8  # Notice.RECALL, and all from rx_frozen on comes by TCP; what TCP brings before may be what follows that
    ROUNDS = 16  # a consent to another round would reach it; what SWITCH, REQUEST and READY say is of one round
    SPACER = 32  # Spacer.ASKED would reach it; between providers: the question is answered
    SPACED = 64  # answer between providers, with SPACER: the reader takes TCP's first byte for one


class Back(IntEnum):
    """End of a round of a direction (`tx_back`): the first of the two sides decides, by one compare-and-swap."""

    NOT = 0
    BACK = 1  # word of the sender: read the ring to tx_back_at, then TCP
    RECALLED = 2  # word of the reader: all bytes from its rx_frozen on come by TCP
    ENDED = 3  # word of the sender: it sends its FIN after the bytes of the ring


class Spacer(IntEnum):
    """First byte by TCP behind a round's ring (`tx_spacer`): decided as `tx_back`, before an urgent byte goes there."""

    NONE = 1  # word of the reader: it has read the ring to its end, and all bytes of TCP are the stream's
    SENT = 2  # word of the sender: it is no byte of the stream, and leaves TCP when the ring has been read
    ASKED = 3  # word of the sender to a provider between, which puts the reader's answer here: NONE or SENT


class Tx(IntEnum):
    """State of a connection's sending direction (`tx_state`). By the segment the peer's `Rx` follows it."""

    TCP = 0  # bytes go by TCP
    SWITCHING = 1  # bytes go by TCP, but no thread may enter the kernel with more: the counts are being compared
    RING = 2  # bytes from tx_switch_offset on go to the ring
    ENDED = 3  # like RING, at its end: the FIN stands behind the bytes of the ring
    LEFT = 4  # the round is over; `tx_follows` decides what comes first: our next byte by TCP, or a recall by the peer
    RESEND = 5  # recalled: the ring's bytes from tx_resend on go out by TCP before anything else


class TxEvent(IntEnum):
    """Event that moves a sending direction."""

    INVITED = 0  # the peer consents to the next round, and nothing here speaks against it
    SETTLED = 1  # no thread is in a kernel write, and the kernel has counted what we have
    UNSETTLED = 2  # a thread is, or the kernel has not; or the provider between has gone meanwhile
    LEAVE = 3  # back to TCP, by ourselves or at the peer's request; also from a round that never began
    RECALLED = 4  # the peer decided first: it reads the ring no further
    RESENT = 5  # all recalled bytes have gone out
    END = 6  # the direction is shut down, or the connection closed


class Rx(IntEnum):
    """State of a connection's receiving direction (`rx_state`)."""

    TCP = 0  # bytes are read from the kernel, by as many threads as like
    OPENING = 1  # no thread may enter the kernel unwatched: the counts are being compared
    CONSENTED = 2  # rx_ready: TCP and the segment are watched, both
    RING = 3  # TCP has been read to the peer's tx_switch_offset; bytes are read from the ring
    BACK = 4  # the round is over and has been read to its end: bytes are read from TCP, and the segment is watched
    REOPENING = 5  # like OPENING, for the next round
    RECALLED = 6  # the ring is read no further: what it holds comes by TCP, for a reader without a shim
    BARRED = 7  # the kernel counts other bytes than we do: the direction stays on TCP


class RxEvent(IntEnum):
    """Event that moves a receiving direction."""

    WILLING = 0  # the peer is there, and nothing here speaks against a round
    SETTLED = 1  # no thread is in an unwatched kernel read, and the kernel has counted what we have
    UNSETTLED = 2  # a thread is, or bytes are just arriving
    MISCOUNT = 3  # the counts differ
    SWITCHED = 4  # the peer has gone to the ring, and all that came by TCP before has been read
    DRAINED = 5  # the peer has gone back to TCP, and the ring has been read to where it did, or come again by TCP
    RECALL = 6  # we have asked for the ring's bytes by TCP, and decided first


# The switch-over of one direction, at either end. A pair that is not here cannot happen: a direction is moved under its
# lock, after a look at its state. Ends and resets that have come are flags beside the state.
TX_TRANSITIONS: Final[dict[tuple[Tx, TxEvent], Tx]] = {
    (Tx.TCP, TxEvent.INVITED): Tx.SWITCHING,
    (Tx.TCP, TxEvent.LEAVE): Tx.LEFT,
    (Tx.SWITCHING, TxEvent.SETTLED): Tx.RING,
    (Tx.SWITCHING, TxEvent.UNSETTLED): Tx.TCP,
    (Tx.RING, TxEvent.UNSETTLED): Tx.TCP,
    (Tx.RING, TxEvent.LEAVE): Tx.LEFT,
    (Tx.RING, TxEvent.RECALLED): Tx.RESEND,
    (Tx.RING, TxEvent.END): Tx.ENDED,
    (Tx.ENDED, TxEvent.LEAVE): Tx.TCP,
    (Tx.LEFT, TxEvent.INVITED): Tx.SWITCHING,
    (Tx.LEFT, TxEvent.LEAVE): Tx.LEFT,
    (Tx.LEFT, TxEvent.RECALLED): Tx.RESEND,
    (Tx.RESEND, TxEvent.RESENT): Tx.TCP,
}

RX_TRANSITIONS: Final[dict[tuple[Rx, RxEvent], Rx]] = {
    (Rx.TCP, RxEvent.WILLING): Rx.OPENING,
    (Rx.OPENING, RxEvent.SETTLED): Rx.CONSENTED,
    (Rx.OPENING, RxEvent.UNSETTLED): Rx.TCP,
    (Rx.OPENING, RxEvent.MISCOUNT): Rx.BARRED,
    (Rx.CONSENTED, RxEvent.SWITCHED): Rx.RING,
    (Rx.CONSENTED, RxEvent.DRAINED): Rx.BACK,
    (Rx.CONSENTED, RxEvent.RECALL): Rx.RECALLED,
    (Rx.RING, RxEvent.DRAINED): Rx.BACK,
    (Rx.RING, RxEvent.RECALL): Rx.RECALLED,
    (Rx.RECALLED, RxEvent.DRAINED): Rx.BACK,
    (Rx.BACK, RxEvent.WILLING): Rx.REOPENING,
    (Rx.REOPENING, RxEvent.SETTLED): Rx.CONSENTED,
    (Rx.REOPENING, RxEvent.UNSETTLED): Rx.BACK,
    (Rx.REOPENING, RxEvent.MISCOUNT): Rx.BARRED,
}


class PeerState(NamedTuple):
    """The words that a peer publishes, in the order of reading: a word that makes another one valid comes before it."""

    attached: int
    rx_ready: int
    notice: int
    shut_wr: int
    fin_seen: int
    tx_back: int
    tx_switched: int
    tx_switch_offset: int
    tx_back_at: int
    rx_frozen: int
    knows: int
    tx_spacer: int
    tail: int  # tail of its ring, and the only one that is no word of "channel_side"

    def back(self, round_number: int) -> int:
        """End of this round, as the peer's `tx_back` gives it; the word of another round says nothing of this one."""
        return self.tx_back & 3 if self.tx_back >> 2 == round_number else Back.NOT


class Role(IntEnum):
    """Side of the TCP handshake that this end was."""

    UNKNOWN = 0
    ACTIVE = 1  # connect(): makes the offer
    PASSIVE = 2  # accept(): claims it


# field = (name, struct code, count); codes: B u8, H u16, I u32, Q u64. Natural alignment is asserted, never padded in.
Field = tuple[str, str, int]


def _same(code: str, names: str) -> tuple[Field, ...]:
    """Fields of one type."""
    return tuple((name, code, 1) for name in names.split())


RECORDS: Final[dict[str, tuple[Field, ...]]] = {
    # One fixed record for every RPC message: 168 bytes.
    "rpc_msg": (
        ("magic", "I", 1),
        ("version", "H", 1),
        ("type", "H", 1),
        ("token", "Q", 1),  # chosen by the shim, echoed by the provider; DEMOTE, PROMOTE: slot << 32 | generation
        ("reason", "I", 1),  # Refusal
        ("flags", "I", 1),
        ("local_addr", "B", 16),
        ("remote_addr", "B", 16),
        *_same("H", "local_port remote_port"),
        ("pid", "I", 1),
        *_same("Q", "cookie netns_cookie"),  # SO_COOKIE and SO_NETNS_COOKIE of the caller's socket
        ("ring_size", "I", 2),  # bytes; offerer -> claimer, and back; WELCOME: with ends of this host, of others
        ("doorbell_index", "I", 1),  # line in the doorbell page
        # WELCOME: the provider's defaults for the shim. OFFER: what there was since the last one, by TCP.
        # REFUSED by LATENCY, CLAIMED: nanoseconds that a message gains, and that a MiB and a turn lose.
        ("promote_after_calls", "I", 1),
        ("promote_after_bytes", "Q", 1),
        ("doorbell_page_id", "B", 16),  # random; equal ids are the same page
        ("arena_id", "B", 16),  # HELLO: random; processes of one family share an arena
        ("segment_id", "B", 16),  # random; names the channel in both ends' `ss`; HELLO: the `family_id`
        ("protocol", "I", 1),  # ASK, ANSWER, OFFER: IPPROTO_* of the explicit socket; 0: any
        ("error", "I", 1),  # ANSWER: errno
        ("wait_ms", "I", 1),  # ASK: how long the call waits for a verdict at most
        ("turns", "I", 1),  # OFFER: how often it received after it had sent, since the last one; else as above
    ),
    # First page of the registry. Bucket words follow at REGISTRY_BUCKETS_OFFSET: bits 0-7 count the offers pending
    # in this bucket (saturating), bits 8-31 a generation that grows with every offer.
    "registry_header": (
        *_same("I", "magic version"),
        ("provider_pid", "I", 1),
        ("closing", "I", 1),  # 1: the provider is going away; make no offers
        ("netns_cookie", "Q", 1),
        ("secret", "Q", 1),  # seed of the bucket hash
        ("commands", "I", 1),  # moves on before and after DEMOTE and PROMOTE are sent to anybody
        ("asks_connect", "I", 1),  # 1: connects of ordinary sockets may begin with an offload protocol: each asks first
        ("answers", "I", 1),  # moves on after an answer has been sent to anybody
        ("pad", "I", 1),
    ),
    # First page of an arena.
    "arena_header": (
        *_same("I", "magic version slot_size slots_max"),
        ("free_head", "Q", 1),  # tag << 32 | (index + 1); lock-free stack of freed slots
        ("slots_used", "I", 1),  # high-water mark
        ("passes", "I", 1),  # true if a process of it has given a connection away by a message
        ("arena_id", "B", 16),
        ("pid_namespace", "Q", 1),  # inode of the one in which holder_pids count; 0: unknown
        # Random name of this family for the provider, used by peers. They do not get `arena_id`: a process that knows
        # it could introduce another arena by it, and keep this one out.
        ("family_id", "B", 16),
    ),
    # One tracked connection of a process family: 512 bytes, written only by that family.
    "conn_slot": (
        # line 0: identity (changes rarely)
        ("generation", "I", 1),  # odd while in use
        *_same("I", "state reason"),  # State, Reason
        ("role", "H", 1),  # Role
        ("family", "H", 1),  # AF_INET, AF_INET6
        ("local_addr", "B", 16),
        ("remote_addr", "B", 16),
        *_same("H", "local_port remote_port"),
        ("fd", "I", 1),
        *_same("I", "pid holders"),  # the process that made or accepted it, may be gone; processes that hold it, a hint
        # line 1: switch-over and shared flags
        *_same("I", "flags error"),  # SLOT_* bits, private to the shim; pending errno, delivered once
        ("cookie", "Q", 1),
        *_same("Q", "born_ns promoted_ns"),  # CLOCK_MONOTONIC; promoted_ns 0: never
        ("segment_id", "B", 16),
        ("free_next", "I", 1),
        *_same("I", "rx_kernel_waiters tx_kernel_waiters"),  # threads inside an unwatched kernel read or wait
        ("pad", "I", 1),
        # lines 2-3: sending direction
        *_same("I", "tx_lock tx_state"),  # Tx
        ("tx_tail", "Q", 1),  # ring: bytes written (authoritative; the segment holds a copy)
        *_same("Q", "tx_switch_offset tx_tcp_bytes tx_tcp_msgs tx_ring_bytes tx_ring_msgs"),
        *_same("Q", "doorbells_sent tx_head_seen tx_sleeps"),
        ("tx_round", "I", 1),  # rounds of this direction so far
        ("tx_pad", "I", 1),
        ("tx_retry_ns", "Q", 1),  # CLOCK_MONOTONIC; it may go there again from then on; 0: nothing to wait for
        ("tx_resend", "Q", 1),  # with Tx.RESEND: count of the ring from which on it goes out by TCP
        ("tx_reserver", "Q", 1),  # with SLOT_RESERVED: pid << 32 | tid
        ("tx_ring_to", "Q", 1),  # the count of channel_producer, authoritative
        ("tx_room_max", "Q", 1),  # bytes that may be unread, by SO_SNDBUF; 0: as many as there is memory for
        # lines 4-5: receiving direction
        *_same("I", "rx_lock rx_state"),  # Rx
        *_same("Q", "rx_head rx_switch_offset rx_tcp_bytes rx_tcp_msgs rx_ring_bytes rx_ring_msgs"),
        ("sleeps", "Q", 1),  # waits that ended in the kernel
        ("spins_won", "Q", 1),  # waits that ended while spinning
        ("spins_lost", "Q", 1),
        ("rx_round", "I", 1),  # the round last consented to
        ("rx_pad", "I", 1),
        ("rx_low_water", "Q", 1),  # SO_RCVLOWAT
        ("wait_calls", "Q", 1),  # system calls of the shim's own around waits, sleeps and doorbells not among them
        ("turns", "Q", 1),  # times that it received after it had sent; by ring, where it has to gain by that
        ("turn_mark", "Q", 1),  # messages sent, at the last of them
        ("rx_spare", "Q", 1),
        # lines 6-7
        ("holder_pids", "I", 16),  # pids of `holders`, as there is room; 0: free; see holder_estrange()
        # further fields of the sending direction
        ("tx_ring_from", "Q", 1),
        ("tx_spill_base", "Q", 1),
        ("tx_limit", "Q", 1),  # with tx_ring_to: count up to which it may go on while the reader stands still
        ("tx_spilled", "Q", 1),  # bytes of the spill that may have been touched since its pages were freed
        # MSG_ZEROCOPY: sends whose completion the program is to read, and completions that it has read
        ("zerocopy_sent", "I", 1),
        ("zerocopy_reported", "I", 1),
        ("option_level", "I", 1),  # level of the socket option that gave the reason
        ("option_name", "I", 1),  # 0: it was none
        ("inherited_ns", "Q", 1),  # CLOCK_MONOTONIC; when it last became a reason that a program was started
        ("spare", "Q", 1),
    ),
    # Records of a segment's header, two of each, by the producer of a ring. All but tail ride on a message's line.
    "channel_producer": (
        ("tail", "Q", 1),
        # Bytes of these counts lie in the ring, all others in the spill behind it. Written before a tail beyond them.
        ("ring_from", "Q", 1),
        ("ring_to", "Q", 1),  # + 1; 0: it goes on
        ("spill_base", "Q", 1),  # the count that lies at the beginning of the spill
        ("want_space", "I", 1),  # the producer waits for room: ring its doorbell after making some
        ("cpu", "I", 1),  # CPU on which the producer last ran, + 1
        # Changes each time that pages of the ring have been freed, and is odd while they are being freed; 0: the
        # producer does not count. Written before a tail beyond them, as all of this.
        ("pages", "I", 1),
        ("pad", "B", 84),
    ),
    # Written by the consumer of a ring.
    "channel_consumer": (
        ("head", "Q", 1),
        *_same("I", "cpu asleep"),  # asleep: a futex, beside the doorbell's word
        ("room_max", "I", 1),  # bytes that SO_RCVBUF leaves room for, if the program has set it; else 0
        ("pad", "B", 108),
    ),
    # Words written by one side during switch-over and at its end. A direction may go to the ring and back any number of
    # times: each is a *round*, counted from 1. A receiver consents to the next round once it has read the last one to
    # its end. Each word carries the number of its round, so no word is taken for that of another.
    "channel_side": (
        ("attached", "I", 1),  # holds the segment and the other's doorbell
        ("rx_ready", "I", 1),  # consents: may be sent to by ring in this round
        ("tx_switched", "I", 1),  # the round for which tx_switch_offset is valid; bytes from there are in the ring
        ("shut_wr", "I", 1),  # shutdown(SHUT_WR) was called, so a FIN is no close
        ("notice", "I", 1),  # Notice; 0 on the fast path
        ("tx_back", "I", 1),  # round << 2 | Back
        ("tx_switch_offset", "Q", 1),
        ("tx_back_at", "Q", 1),  # with Back.BACK: count of the ring's bytes (its tail) at which TCP takes over again
        ("rx_frozen", "Q", 1),  # head at which reading by ring stopped; valid with Notice.RECALL
        ("hint", "I", 1),  # number for your hint ring at each publication, or new room; 0: none; bit 31: below
        ("tx_ended", "I", 1),  # the last round that is over: what follows comes by TCP, and tail stands
        # Only where a provider stands between the two ends of the connection; see provider/carry/direction.py.
        ("fin_seen", "I", 1),  # a shim: Seen; where does the ring end?
        ("tx_fin", "I", 1),  # a provider: nothing follows; shut_wr and Notice.CLOSED say how it ended
        ("tx_fin_at", "Q", 1),  # a provider: with tx_fin, the count of the ring's bytes at which the stream ends
        ("acked", "I", 1),  # a provider: Acked, what of your words the other end has now
        # The first after Back.BACK: our first byte by TCP (BACK) or the reader (RECALLED). As tx_back.
        ("tx_follows", "I", 1),
        # A program that took it up after an exec has another doorbell, and is rung always (HINT_RING_ALWAYS).
        # The nonce: random (NEW_DOORBELL, NONCE_COUNT), or 0: withdrawn. `doorbell_nonce_seen`: the other's in use.
        *_same("Q", "doorbell_nonce doorbell_nonce_seen"),
        ("knows", "I", 1),  # Knows: what its holder can be asked for; written after the three that follow
        *_same("I", "slot generation tx_spacer"),  # place in its holder's family; round << 2 | Spacer
        ("family_id", "B", 16),
    ),
    # A piece of a ring, as the shim gives it to `sidestep.rings` in its own process.
    "sidestep_piece": (
        ("serial", "Q", 1),  # serial of the connection in this process
        ("position", "Q", 1),  # position of its first byte: in the stream received, or in the ring's own count to send
        ("offset", "I", 1),  # offset in the mapping of `sidestep_map`
        ("len", "I", 1),
        ("size", "I", 1),  # size of the ring and the spill together
        ("pad", "I", 1),
    ),
    # SDP (A4) BSDH, big-endian on the wire: 16 bytes.
    "sdp_bsdh": (*_same("B", "mid flags"), ("bufs", "H", 1), *_same("I", "len mseq mseq_ack")),
    # A connection that Python lends to the engine and takes back, as Python's objects have it.
    "engine_record": (
        # flags: each ring is in use; bytes of a private buffer of ours; flag: larger ones may be asked for
        *_same("I", "sends receives local_size grows"),
        # sdp/flow.py, carry/hub.py (asking), and rdma/iwarp: sender.py and receiver.py (msn)
        *_same("I", "tx_mseq rx_mseq peer_ack credit posted last_bufs_sent last_ack_sent remote_size owes asking"),
        *_same("I", "tx_msn rx_msn"),
        # key of the pinned application ring, and channel_producer.pages since then; 0: it is not pinned
        *_same("I", "ring_lkey ring_pages"),
        # remote/link.py: bytes of data of which the word has come, and that have not; then carry/remote_relay.py
        *_same("Q", "data_left sent held window read_reported read_step"),
        # done meanwhile: messages, those with payload, their bytes, and those of the stream among them
        *_same("Q", "messages_sent messages_received payloads_sent payloads_received"),
        *_same("Q", "wire_sent wire_received bytes_sent bytes_received"),
    ),
}
CHANNEL_RECORDS: Final = ("channel_producer", "channel_consumer", "channel_side")

# Fields that threads and processes read while another changes them: `_Atomic` in C.
ATOMIC: Final[dict[str, set[str]]] = {
    "registry_header": {"closing", "commands", "asks_connect", "answers"},
    "arena_header": {"free_head", "slots_used", "passes"},
    **{
        record: {name for name, code, _ in RECORDS[record] if code != "B"} for record in ("conn_slot", *CHANNEL_RECORDS)
    },
}

_SIZES: Final = {"B": 1, "H": 2, "I": 4, "Q": 8}


def offsets(record: str) -> dict[str, int]:
    """Byte offset of each field of `record`; raises ValueError where a field is not naturally aligned."""
    at, found = 0, {}
    for name, code, count in RECORDS[record]:
        if at % _SIZES[code]:
            raise ValueError(f"{record}.{name} at {at} is not aligned to {_SIZES[code]}")
        found[name] = at
        at += _SIZES[code] * count
    return found


def size(record: str) -> int:
    return sum(_SIZES[code] * count for _, code, count in RECORDS[record])


RPC_MSG_SIZE: Final = size("rpc_msg")
CONN_SLOT_SIZE: Final = size("conn_slot")
_FORMATS: Final = {
    name: struct.Struct("=" + "".join(f"{n}s" if c == "B" and n > 1 else f"{n}{c}" for _, c, n in fields))
    for name, fields in RECORDS.items()
}

# Plan for packing a record: name -> (value if none is given, True for an array of values)
_PLANS: Final[dict[str, dict[str, tuple[Any, bool]]]] = {
    record: {
        name: (0, False) if count == 1 else (bytes(count), False) if code == "B" else ((0,) * count, True)
        for name, code, count in fields
    }
    for record, fields in RECORDS.items()
}


def pack(record: str, **values: Any) -> bytes:
    """The bytes of `record`; fields not named are zero. Arrays of u8 are bytes, other arrays tuples."""
    plan = _PLANS[record]
    if unknown := values.keys() - plan.keys():
        raise TypeError(f"{record} has no field {sorted(unknown)}")
    flat: list[Any] = []
    for name, (default, spread) in plan.items():
        value = values.get(name, default)
        if spread:
            flat.extend(value)
        else:
            flat.append(value)
    return _FORMATS[record].pack(*flat)


def unpack(record: str, data: bytes | bytearray | memoryview) -> dict[str, Any]:
    """The fields of the `record` that `data` begin with; struct.error where they are too short."""
    flat = iter(_FORMATS[record].unpack_from(data))
    found: dict[str, Any] = {}
    for name, code, count in RECORDS[record]:
        found[name] = next(flat) if count == 1 or code == "B" else tuple(next(flat) for _ in range(count))
    return found


def bucket_index(secret: int, addr_a: bytes, port_a: int, addr_b: bytes, port_b: int) -> int:
    """Registry bucket of a connection; the same from both ends. FNV-1a over each end, joined by addition."""
    mask = (1 << 64) - 1

    def one(addr: bytes, port: int) -> int:
        value = (0xCBF29CE484222325 ^ secret) & mask
        for byte in addr + struct.pack("<H", port):
            value = ((value ^ byte) * 0x100000001B3) & mask
        return value

    total = (one(addr_a, port_a) + one(addr_b, port_b)) & mask
    return (total ^ (total >> 32)) % REGISTRY_BUCKETS
