"""Decisions of one seed: the settings of both ends, the fabric, the trouble, and the habits of the users.

Small buffers, few credits and short sends are common: whatever waits for room is where the faults are. Nothing is drawn
that would make a conversation long; a hundred messages are enough.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import partial
from random import Random
from typing import Final

from sidestep import limits
from sidestep.rdma.loopback import NO_DELAY, Faults, Timing
from sidestep.rdma.verbs import DeviceAttributes
from sidestep.sdp.settings import Carrier, SdpSettings
from sidestep.sdp.strategy import Strategy
from sidestep.sdp.wire import Mode

_NEVER: Final = 1 << 40
_MESSAGES_MAX: Final = 100


class PlanKind(Enum):
    """Expectation of a conversation."""

    CLEAN = "clean"  # nothing goes wrong: all bytes arrive and both ends close gracefully
    RUDE = "rude"  # an end aborts, or closes before all is read
    FAULTY = "faulty"  # the transport fails
    REFUSED = "refused"  # there is no connection


class Theme(Enum):
    """Main mechanism of a conversation, so that each has its share."""

    MIXED = "anything"
    BULK = "large sends into large receives that are there before: Zcopy in Pipelined mode"
    TAKEN_BACK = "the same, and much is cancelled"
    TALK = "one end sends little and receives much: Transactions"


class Trouble(Enum):
    """Event that goes wrong."""

    ABORT = "abort"
    CLOSE = "close"
    LINGER = "close with a linger of some seconds"
    LINGER_ZERO = "close with a linger of 0"
    CUT = "cut"
    RESET = "reset"
    DEVICE = "device fails"
    LOSSY = "some message is lost for good"
    ERRORS = "some request fails"
    NOBODY = "nobody listens"
    VERSION = "another version"
    GIVEN_UP = "given up at once"
    UNREACHABLE = "no such device"
    REJECTED = "the listener aborts"
    NO_MEMORY = "an end cannot have private buffers"


TROUBLES: Final = {
    PlanKind.CLEAN: (),
    PlanKind.RUDE: (Trouble.ABORT, Trouble.CLOSE, Trouble.LINGER, Trouble.LINGER_ZERO),
    PlanKind.FAULTY: (Trouble.CUT, Trouble.RESET, Trouble.DEVICE, Trouble.LOSSY, Trouble.ERRORS),
    PlanKind.REFUSED: tuple(Trouble)[9:],
}


@dataclass(frozen=True, slots=True)
class Habits:
    """Behaviour of the program at one end. Chances are 0 to 1, delays seconds, sizes bytes."""

    total: int  # bytes to send
    send_sizes: tuple[int, ...]  # drawn from
    send_window: int  # sends that it has outstanding
    send_gap: float  # chance of a pause before a send
    urgent: float  # chance that a send ends in an urgent byte
    bcopy_only: float
    cancel_send: float
    receive_sizes: tuple[int, ...]
    receive_window: int
    receive_gap: float
    waitall: float
    cancel_receive: float
    peek: float
    waits_for_readable: bool  # receives only when told that there is something
    pause_s: tuple[float, float]
    long_pause_s: tuple[float, float]
    long_pauses: float  # chance that a pause is a long one
    starts_early: bool  # uses the stream before it is established
    batches: float  # chance to let several requests come together before anything is done about them
    reenters: float  # chance to go on from inside of a call
    wish: float  # chance of a wish (mode, size) at each step
    modes: tuple[Mode, ...]  # that it wishes for
    resizes: tuple[int, ...]  # sizes that it asks for
    closes_at_once: bool  # close() instead of shutdown_write() where the other end has ended already


@dataclass(frozen=True, slots=True)
class EndPlan:
    """One end."""

    settings: SdpSettings
    habits: Habits
    keeps_registered: bool  # users' buffers, for the next time
    private_bytes_kept: int  # of unused private buffers


@dataclass(frozen=True)
class Plan:
    """One conversation."""

    seed: int
    kind: PlanKind
    timing: Timing
    attributes: DeviceAttributes
    ends: tuple[EndPlan, EndPlan]  # the connecting one first
    faults: Faults | None
    fail_registration: float  # chance, once there is a connection
    trouble: Trouble | None
    trouble_after: int  # events of users before the trouble begins
    trouble_delay_s: float
    trouble_end: int  # index of the end that makes it
    moving: bool  # a socket is to move to another process; only the tests play that


class _Foreign(SdpSettings):
    """Settings as another implementation may have them; ours does not let its users."""

    def __post_init__(self) -> None:
        """Checks nothing."""


_IWARP: Final = DeviceAttributes(
    request_private_data_max=512, reply_private_data_max=512, reject_private_data_max=512, private_data_padded=False,
    read_scatter_max=1, atomics=False, immediate=False, acknowledged=False, error_disconnects=True,
    read_sink_remote_write=True,
)  # fmt: skip


def draw(seed: int, *, kind: PlanKind | None = None) -> Plan:
    """The plan of a seed; `kind` overrides its own."""
    return draw_by(Random(seed), seed, kind)  # it decides the conversation, no secret


def draw_by(rng: Random, seed: int, kind: PlanKind | None, beside: Plan | None = None) -> Plan:
    """A plan; it suits the fabric of the one that it is `beside`."""
    drawn = rng.choices(list(PlanKind), (60, 18, 18, 4))[0]
    kind = kind or drawn
    theme = rng.choices(list(Theme), (35, 25, 20, 20))[0]
    carrier = Carrier.IWARP if rng.random() < 0.25 else Carrier.INFINIBAND
    if beside is not None:
        carrier = beside.ends[0].settings.carrier
    version = rng.choice((None, 0x22, 0x11)) if carrier is Carrier.INFINIBAND else None
    timing = _timing(rng)
    trouble = rng.choice(TROUBLES[kind]) if beside is None and TROUBLES[kind] else None
    fail_registration = rng.choice((0.1, 0.5, 1.0)) if rng.random() < 0.2 else 0.0
    faults = _faults(rng, trouble, carrier)
    if faults is None and (fail_registration or trouble is Trouble.NO_MEMORY):
        faults = Faults()
    if trouble is Trouble.VERSION:
        carrier = Carrier.INFINIBAND
    ends = _ends(rng, kind, theme, carrier, version, trouble)
    moving = kind is not PlanKind.REFUSED and rng.random() < 0.15
    attributes = _IWARP if carrier is Carrier.IWARP else DeviceAttributes()
    return Plan(
        seed, kind,
        attributes=replace(attributes, checks_local_memory=rng.random() < 0.5),
        timing=NO_DELAY if rng.random() < 0.1 else timing,
        ends=ends, faults=faults, trouble=trouble, moving=moving,
        fail_registration=0.0 if moving or beside is not None else fail_registration,  # registered once more there
        trouble_after=int(rng.expovariate(1 / 12)),
        trouble_delay_s=rng.choice((0.0, 0.0, 1e-6, 1e-5, 1e-4, 1e-3)),
        trouble_end=rng.randrange(2),
    )  # fmt: skip


def _ends(
    rng: Random, kind: PlanKind, theme: Theme, carrier: Carrier, version: int | None, trouble: Trouble | None
) -> tuple[EndPlan, EndPlan]:
    keepalive_s = rng.choice((0.01, 1.0)) if kind is PlanKind.FAULTY else None
    ends = []
    for index in range(2):
        settings = _settings(rng, carrier, version, keepalive_s, patient=kind is PlanKind.CLEAN)
        if theme is not Theme.MIXED:
            settings = _themed_settings(rng, theme, index, settings)
        habits = _habits(rng)
        if theme is not Theme.MIXED:
            habits = _themed_habits(rng, theme, index, habits)
        ends.append(EndPlan(settings, habits, rng.random() < 0.3, rng.choice((0, 1 << 20))))
    for index, end in enumerate(ends):
        most = _MESSAGES_MAX * (ends[1 - index].settings.receive_size - 16)  # if all goes by Bcopy
        settings = end.settings
        if trouble is Trouble.VERSION:
            settings = replace(settings, version=(0x11, 0x22)[index])
        ends[index] = replace(end, habits=replace(end.habits, total=min(end.habits.total, most)), settings=settings)
    for index, end in enumerate(ends):
        if rng.random() < 0.08:
            known = {each.name: getattr(end.settings, each.name) for each in fields(end.settings)}
            ends[index] = replace(end, settings=_Foreign(**{**known, "receive_count": rng.choice((3, 4))}))
    return ends[0], ends[1]


def _timing(rng: Random) -> Timing:
    return Timing(
        wire_s=rng.choice(((0.0, 0.0), (1e-6, 5e-6), (1e-6, 5e-6), (1e-6, 1e-4), (1e-5, 1e-3))),
        read_s=rng.choice(((0.0, 0.0), (0.0, 2e-5), (0.0, 1e-3))),
        cm_s=rng.choice(((0.0, 0.0), (5e-6, 1e-4), (5e-6, 1e-2))),
        registration_s=rng.choice(((0.0, 0.0), (5e-6, 5e-5), (5e-6, 2e-3))),
        bandwidth=rng.choice((None, None, 1e9, 1e8)),
    )


def _faults(rng: Random, trouble: Trouble | None, carrier: Carrier) -> Faults | None:
    loses = rng.random() < 0.1 and carrier is Carrier.INFINIBAND  # iWARP connects and disconnects over TCP
    faults = Faults(
        lose_cm=0.15 if loses else 0.0,
        lose_connection=rng.choice((0.005, 0.03)) if trouble is Trouble.LOSSY else 0.0,
        complete_with_error=rng.choice((0.01, 0.05)) if trouble is Trouble.ERRORS else 0.0,
    )
    return None if faults == Faults() else faults


def _settings(
    rng: Random, carrier: Carrier, version: int | None, keepalive_s: float | None, *, patient: bool
) -> SdpSettings:
    least, size = limits.SDP_SEND_QUEUE_MIN, _size(rng)
    return SdpSettings(
        receive_size=size, receive_count=rng.choice((5, 5, 6, 7, 8, 8, 16, 16, 64)), remote_size=_size(rng),
        max_adverts=rng.choice((1, 1, 2, 3, 8, 255)), send_queue=rng.choice((least, least + 1, 12, 16, 32, 128)),
        reads_max=rng.choice((1, 2, 4, 16)), carrier=carrier, version=version, strategy=_strategy(rng, size),
        advert_answer_s=rng.choice((1e-4, 1e-2, 1.0)), cancel_answer_s=10.0,
        close_s=60.0 if patient else rng.choice((0.01, 1.0, 60.0)), last_ack_s=rng.choice((1e-3, 1.0)),
        probe_s=rng.choice((1e-4, 0.05)), keepalive_s=keepalive_s, urgent_inline=rng.random() < 0.3,
    )  # fmt: skip


def _themed_settings(rng: Random, theme: Theme, index: int, settings: SdpSettings) -> SdpSettings:
    """Settings under which the mechanism of the theme happens."""
    size = rng.choice((37, 40, 64, 100, 200))
    asks, answers = theme is Theme.TALK and index == 0, theme is Theme.TALK and index == 1
    if answers:
        size = rng.choice((128, 256, 600))  # a Transaction takes 36 bytes of it
    return replace(
        settings, receive_size=size,
        receive_count=rng.choice((5, 5, 6, 7)) if answers else settings.receive_count,
        max_adverts=rng.choice((1, 2, 3, 8, 255)),
        strategy=partial(
            Strategy, bcopy_max=_NEVER if asks else rng.choice((0, 10, 50)), read_min=rng.choice((1, 1, 50, 300)),
            sink_min=None if answers and rng.random() < 0.8 else rng.choice((1, size + 1)),
            advert_max=rng.choice((300, 1000, 1 << 20)), adverts_in_flight=1 if asks else rng.choice((1, 2, 8)),
            payload=rng.choice((1, 20)), transactions=asks or rng.random() < 0.8, refusals=rng.choice((2, 1000)),
            rest=rng.choice((1, 8)),
        ),
    )  # fmt: skip


def _themed_habits(rng: Random, theme: Theme, index: int, habits: Habits) -> Habits:
    scale = rng.choice((200, 400, 1000))
    little, takes_back = theme is Theme.TALK and index == 0, theme is Theme.TAKEN_BACK
    most = scale // 5 if little else scale
    if not takes_back:
        habits = replace(habits, receive_gap=rng.choice((0.0, 0.0, 0.3)))
    habits = replace(
        habits, total=int(most * rng.uniform(5, 15)), send_sizes=_sizes(rng, most, 0.05 if little else 0.2, 2, (1, 3)),
        send_window=1 if little else rng.choice((1, 2, 4, 8)), receive_sizes=_sizes(rng, scale, 0.3, 3, (1, 3)),
        receive_window=rng.choice((2, 3, 8)), waitall=rng.choice((0.0, 0.0, 0.1)), waits_for_readable=False,
        send_gap=0.7 if takes_back else habits.send_gap,
        pause_s=rng.choice(((0.0, 1e-5), (1e-5, 3e-4))) if takes_back else habits.pause_s,
        wish=rng.choice((0.1, 0.4)), modes=(Mode.PIPELINED, Mode.PIPELINED, Mode.COMBINED, Mode.BUFFERED),
        cancel_send=rng.choice((0.0, 0.2, 0.6)) if takes_back else habits.cancel_send,
        cancel_receive=rng.choice((0.0, 0.2, 0.6)) if takes_back else habits.cancel_receive,
    )  # fmt: skip
    return _talker(rng, index, habits) if theme is Theme.TALK else habits


def _talker(rng: Random, index: int, habits: Habits) -> Habits:
    """Habits of an end of Transactions: the asking one always has room for an answer, the other is slow to read.

    The other says little, too: a SinkAvail goes only where nothing else stands before the bytes that it asks for.
    """
    if index == 0:
        return replace(
            habits, modes=(Mode.PIPELINED,), total=2 * habits.total, urgent=0.0, receive_gap=0.0, waitall=0.0,
            cancel_receive=rng.choice((0.0, 0.0, 0.0, 0.2)),
        )  # fmt: skip
    return replace(
        habits, modes=(Mode.PIPELINED,), send_gap=rng.choice((0.5, 0.9)), cancel_send=rng.choice((0.0, 0.0, 0.4)),
        send_window=1, receive_gap=rng.choice((0.7, 1.0)), receive_window=1,
        pause_s=rng.choice(((1e-5, 3e-4), (1e-4, 1e-3), (1e-4, 1e-3))), wish=1.0,
    )  # fmt: skip


def _size(rng: Random) -> int:
    least = limits.SDP_BUFFER_SIZE_MIN
    small = rng.randint(least, 100), rng.randint(64, 600), rng.randint(64, 600)
    return rng.choice((least, least + 1, *small, 4096, 32784, 40000))


def _sizes(rng: Random, scale: int, least: float, most: float, counts: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(max(1, int(scale * rng.uniform(least, most))) for _ in range(rng.choice(counts)))


def _strategy(rng: Random, size: int) -> partial[Strategy]:
    return partial(
        Strategy, bcopy_max=rng.choice((0, 1, 16, 100, 100, 500, 2000, _NEVER)),
        read_min=rng.choice((1, 1, 16, 300, _NEVER)), sink_min=rng.choice((None, 1, 1, size + 1, 2 * size)),
        advert_max=rng.choice((50, 300, 1000, 1 << 20)), adverts_in_flight=rng.choice((1, 2, 8)),
        payload=rng.choice((1, 1, 20, 64)), transactions=rng.random() < 0.7, pipelined=rng.random() < 0.8,
        refusals=rng.choice((1, 2, 4, 1000)), rest=rng.choice((1, 8, 64)),
    )  # fmt: skip


def _habits(rng: Random) -> Habits:
    def often(chance: float, of: float = 1.0) -> float:
        return chance if (of == 1.0 or rng.random() < of) and rng.random() < 0.5 else 0.0

    scale = rng.choice((1, 40, 200, 200, 1000, 6000))
    return Habits(
        total=0 if rng.random() < 0.05 else int(scale * rng.uniform(0.5, 12)),
        send_sizes=_sizes(rng, scale, 0.02, 4, (1, 2, 4)), send_window=rng.choice((1, 1, 2, 3, 8)),
        send_gap=often(0.5), urgent=often(0.3, 0.3), bcopy_only=often(0.3, 0.2), cancel_send=often(0.5, 0.3),
        receive_sizes=_sizes(rng, scale, 0.05, 8, (1, 2, 4)), receive_window=rng.choice((1, 1, 2, 4, 8)),
        receive_gap=often(0.6), waitall=rng.choice((0.0, 0.0, 0.3, 1.0)), cancel_receive=often(0.5, 0.3),
        peek=often(0.5, 0.2), waits_for_readable=rng.random() < 0.3,
        pause_s=rng.choice(((0.0, 0.0), (1e-6, 1e-5), (1e-6, 1e-3))),
        long_pause_s=rng.choice(((1e-3, 1e-2), (0.1, 3.0))), long_pauses=rng.choice((0.0, 0.1, 0.3)),
        starts_early=rng.random() < 0.5, batches=rng.choice((0.0, 0.5, 0.9)), reenters=rng.choice((0.0, 0.5, 1.0)),
        wish=rng.choice((0.0, 0.0, 0.1, 0.4)), modes=tuple(Mode),
        resizes=tuple(_size(rng) for _ in range(3)) if rng.random() < 0.2 else (), closes_at_once=rng.random() < 0.5,
    )  # fmt: skip
