"""What one seed decides: the settings of both ends, the fabric, what goes wrong, and how the users behave.

Everything is drawn with a few dozen numbers so that small buffers, few credits and short sends are common: what waits
for room is where the faults are. Nothing is drawn that would make a conversation long; a hundred messages are enough.
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
_MOVES: Final[tuple[tuple[tuple[int, ...], ...], ...]] = (
    ((0,),), ((1,),), ((0,), (1,)), ((1,), (0,)), ((0,), (0,)), ((1,), (1,), (0,)),
    ((0, 1),), ((1, 0),), ((0, 1), (1,)),
)  # fmt: skip


class PlanKind(Enum):
    """What is to be expected of a conversation."""

    CLEAN = "clean"  # nothing goes wrong: all bytes arrive and both ends close gracefully
    RUDE = "rude"  # an end aborts, or closes before all is read
    FAULTY = "faulty"  # the transport fails
    REFUSED = "refused"  # there is no connection


class Theme(Enum):
    """What a conversation is mostly about, so that every mechanism has its share."""

    MIXED = "anything"
    BULK = "large sends into large receives that are there before: Zcopy in Pipelined mode"
    TAKEN_BACK = "the same, and much is cancelled"
    TALK = "one end sends little and receives much: Transactions"


class Rudeness(Enum):
    """How an end leaves before its time."""

    ABORT = "abort"
    CLOSE = "close"
    LINGER = "close with a linger of some seconds"
    LINGER_ZERO = "close with a linger of 0"


class Breakage(Enum):
    """How the transport fails."""

    CUT = "cut"
    RESET = "reset"
    DEVICE = "device fails"
    LOSSY = "some message is lost for good"
    ERRORS = "some request fails"


class Refused(Enum):
    """Why there is no connection."""

    NOBODY = "nobody listens"
    VERSION = "another version"
    GIVEN_UP = "given up at once"
    UNREACHABLE = "no such device"
    REJECTED = "the listener aborts"
    NO_MEMORY = "an end cannot have private buffers"


@dataclass(frozen=True, slots=True)
class Habits:
    """How the program at one end behaves. Chances are 0 to 1, delays seconds, sizes bytes."""

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
    reenters: float  # chance to go on from inside of the telling
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


@dataclass(frozen=True, slots=True)
class Plan:
    """One conversation."""

    seed: int
    kind: PlanKind
    theme: Theme
    timing: Timing
    attributes: DeviceAttributes
    ends: tuple[EndPlan, EndPlan]  # the connecting one first
    faults: Faults | None
    fail_registration: float  # chance, once there is a connection
    trouble: Rudeness | Breakage | Refused | None
    trouble_after: int  # things told to users before the trouble begins
    trouble_delay_s: float
    trouble_end: int  # which end makes it
    moves: tuple[tuple[int, ...], ...]  # ends whose sockets move to another process, those of a step at the same time
    moves_after: int  # things told before
    turned: bool  # beside another one: connects the other way round
    others: tuple[Plan, ...]  # conversations beside this one


class _Foreign(SdpSettings):
    """Settings as another implementation may have them; ours does not let its users."""

    def __post_init__(self) -> None:
        """Nothing is checked."""


_IWARP: Final = DeviceAttributes(
    request_private_data_max=512,
    reply_private_data_max=512,
    reject_private_data_max=512,
    private_data_padded=False,
    read_scatter_max=1,
    atomics=False,
    immediate=False,
    acknowledged=False,
    error_disconnects=True,
    read_sink_remote_write=True,
)
_INFINIBAND: Final = DeviceAttributes()


def draw(seed: int, *, kind: PlanKind | None = None, beside: Plan | None = None) -> Plan:
    """The plan of a seed; `kind` overrides what it would be. It suits the fabric of the one that it is `beside`."""
    rng = Random(seed)  # it decides what is tried, no secret
    drawn = rng.choices(list(PlanKind), (60, 18, 18, 4))[0]
    kind = kind or drawn
    theme = rng.choices(list(Theme), (35, 25, 20, 20))[0]
    carrier = Carrier.IWARP if rng.random() < 0.25 else Carrier.INFINIBAND
    if beside is not None:
        carrier = beside.ends[0].settings.carrier
    version = rng.choice((None, 0x22, 0x11)) if carrier is Carrier.INFINIBAND else None
    timing = _timing(rng)
    trouble = _trouble(rng, kind) if beside is None else None
    fail_registration = rng.choice((0.1, 0.5, 1.0)) if rng.random() < 0.2 else 0.0
    faults = _faults(rng, trouble, carrier)
    if (fail_registration or trouble is Refused.NO_MEMORY) and faults is None:
        faults = Faults()
    if trouble is Refused.VERSION:
        carrier = Carrier.INFINIBAND
    ends = _ends(rng, kind, theme, carrier, version, trouble)
    moves = kind is not PlanKind.REFUSED and rng.random() < 0.15
    if moves or beside is not None:  # what goes wrong is a matter of the fabric
        fail_registration = 0.0  # private buffers are registered once more
    plan = Plan(
        seed=seed,
        kind=kind,
        theme=theme,
        attributes=replace(_IWARP if carrier is Carrier.IWARP else _INFINIBAND, checks_local_memory=rng.random() < 0.5),
        timing=NO_DELAY if rng.random() < 0.1 else timing,
        ends=ends,
        faults=faults,
        fail_registration=fail_registration,
        trouble=trouble,
        trouble_after=int(rng.expovariate(1 / 12)),
        trouble_delay_s=rng.choice((0.0, 0.0, 1e-6, 1e-5, 1e-4, 1e-3)),
        trouble_end=rng.randrange(2),
        moves=rng.choice(_MOVES) if moves else (),
        moves_after=int(rng.expovariate(1 / 10)),
        turned=rng.random() < 0.5,
        others=(),
    )
    if beside is None and kind is not PlanKind.REFUSED and rng.random() < 0.15:
        plan = replace(plan, others=tuple(_companion(rng, plan) for _ in range(rng.choice((1, 1, 2)))))
        if any(other.moves for other in plan.others):
            plan = replace(plan, fail_registration=0.0)
    return plan


def _ends(
    rng: Random,
    kind: PlanKind,
    theme: Theme,
    carrier: Carrier,
    version: int | None,
    trouble: Rudeness | Breakage | Refused | None,
) -> tuple[EndPlan, EndPlan]:
    keepalive_s = rng.choice((0.01, 1.0)) if kind is PlanKind.FAULTY else None
    ends = [
        EndPlan(
            _themed_settings(
                rng, theme, index, _settings(rng, carrier, version, keepalive_s, patient=kind is PlanKind.CLEAN)
            ),
            _themed_habits(rng, theme, index, _habits(rng)),
            keeps_registered=rng.random() < 0.3,
            private_bytes_kept=rng.choice((0, 1 << 20)),
        )
        for index in range(2)
    ]
    ends = [replace(end, habits=_bounded(end.habits, ends[1 - index].settings)) for index, end in enumerate(ends)]
    if trouble is Refused.VERSION:
        ends = [
            replace(end, settings=replace(end.settings, version=version))
            for end, version in zip(ends, (0x11, 0x22), strict=True)
        ]
    for index, end in enumerate(ends):
        if rng.random() < 0.08:
            known = {each.name: getattr(end.settings, each.name) for each in fields(end.settings)}
            ends[index] = replace(end, settings=_Foreign(**{**known, "receive_count": rng.choice((3, 4))}))
    return ends[0], ends[1]


def _companion(rng: Random, plan: Plan) -> Plan:
    """A conversation beside the one that is planned; what goes wrong there must not be seen here."""
    everywhere = plan.trouble in (Breakage.DEVICE, Breakage.LOSSY, Breakage.ERRORS)
    return draw(rng.getrandbits(32), kind=PlanKind.FAULTY if everywhere else PlanKind.CLEAN, beside=plan)


def _timing(rng: Random) -> Timing:
    wire = rng.choice(((0.0, 0.0), (1e-6, 5e-6), (1e-6, 5e-6), (1e-6, 1e-4), (1e-5, 1e-3)))
    return Timing(
        wire_s=wire,
        read_s=rng.choice(((0.0, 0.0), (0.0, 2e-5), (0.0, 1e-3))),
        cm_s=rng.choice(((0.0, 0.0), (5e-6, 1e-4), (5e-6, 1e-2))),
        registration_s=rng.choice(((0.0, 0.0), (5e-6, 5e-5), (5e-6, 2e-3))),
        bandwidth=rng.choice((None, None, 1e9, 1e8)),
    )


def _trouble(rng: Random, kind: PlanKind) -> Rudeness | Breakage | Refused | None:
    if kind is PlanKind.RUDE:
        return rng.choice(list(Rudeness))
    if kind is PlanKind.FAULTY:
        return rng.choice(list(Breakage))
    if kind is PlanKind.REFUSED:
        return rng.choice(list(Refused))
    return None


def _faults(rng: Random, trouble: Rudeness | Breakage | Refused | None, carrier: Carrier) -> Faults | None:
    loses = rng.random() < 0.1 and carrier is Carrier.INFINIBAND  # iWARP connects and disconnects over TCP
    faults = Faults(
        lose_cm=0.15 if loses else 0.0,
        lose_connection=rng.choice((0.005, 0.03)) if trouble is Breakage.LOSSY else 0.0,
        complete_with_error=rng.choice((0.01, 0.05)) if trouble is Breakage.ERRORS else 0.0,
    )
    return None if faults == Faults() else faults


def _settings(
    rng: Random, carrier: Carrier, version: int | None, keepalive_s: float | None, *, patient: bool
) -> SdpSettings:
    size = _size(rng)
    return SdpSettings(
        receive_size=size,
        receive_count=rng.choice((5, 5, 6, 7, 8, 8, 16, 16, 64)),
        remote_size=_size(rng),
        max_adverts=rng.choice((1, 1, 2, 3, 8, 255)),
        send_queue=rng.choice((limits.SDP_SEND_QUEUE_MIN, limits.SDP_SEND_QUEUE_MIN + 1, 12, 16, 32, 128)),
        reads_max=rng.choice((1, 2, 4, 16)),
        carrier=carrier,
        version=version,
        strategy=_strategy(rng, size),
        advert_answer_s=rng.choice((1e-4, 1e-2, 1.0)),
        cancel_answer_s=10.0,
        close_s=60.0 if patient else rng.choice((0.01, 1.0, 60.0)),
        last_ack_s=rng.choice((1e-3, 1.0)),
        probe_s=rng.choice((1e-4, 0.05)),
        keepalive_s=keepalive_s,
        urgent_inline=rng.random() < 0.3,
    )


def _themed_settings(rng: Random, theme: Theme, index: int, settings: SdpSettings) -> SdpSettings:
    """Settings under which what the theme is about happens."""
    if theme is Theme.MIXED:
        return settings
    size = rng.choice((37, 40, 64, 100, 200))
    asks = theme is Theme.TALK and index == 0
    answers = theme is Theme.TALK and index == 1
    if answers:
        size = rng.choice((128, 256, 600))  # a Transaction takes 36 bytes of it
    return replace(
        settings,
        receive_size=size,
        receive_count=rng.choice((5, 5, 6, 7)) if answers else settings.receive_count,
        max_adverts=rng.choice((1, 2, 3, 8, 255)),
        strategy=partial(
            Strategy,
            bcopy_max=_NEVER if asks else rng.choice((0, 10, 50)),
            read_min=rng.choice((1, 1, 50, 300)),
            sink_min=None if answers and rng.random() < 0.8 else rng.choice((1, size + 1)),
            advert_max=rng.choice((300, 1000, 1 << 20)),
            adverts_in_flight=1 if asks else rng.choice((1, 2, 8)),
            payload=rng.choice((1, 20)),
            transactions=asks or rng.random() < 0.8,
            refusals=rng.choice((2, 1000)),
            rest=rng.choice((1, 8)),
        ),
    )


def _themed_habits(rng: Random, theme: Theme, index: int, habits: Habits) -> Habits:
    if theme is Theme.MIXED:
        return habits
    scale = rng.choice((200, 400, 1000))
    little = theme is Theme.TALK and index == 0
    send_scale = scale // 5 if little else scale
    takes_back = theme is Theme.TAKEN_BACK
    if not takes_back:
        habits = replace(habits, receive_gap=rng.choice((0.0, 0.0, 0.3)))
    habits = replace(
        habits,
        total=int(send_scale * rng.uniform(5, 15)),
        send_sizes=tuple(
            max(1, int(send_scale * rng.uniform(0.05 if little else 0.2, 2))) for _ in range(rng.choice((1, 3)))
        ),
        send_window=1 if little else rng.choice((1, 2, 4, 8)),
        receive_sizes=tuple(max(1, int(scale * rng.uniform(0.3, 3))) for _ in range(rng.choice((1, 3)))),
        receive_window=rng.choice((2, 3, 8)),
        waitall=rng.choice((0.0, 0.0, 0.1)),
        waits_for_readable=False,
        send_gap=0.7 if takes_back else habits.send_gap,
        pause_s=rng.choice(((0.0, 1e-5), (1e-5, 3e-4))) if takes_back else habits.pause_s,
        wish=rng.choice((0.1, 0.4)),
        modes=(Mode.PIPELINED, Mode.PIPELINED, Mode.COMBINED, Mode.BUFFERED),
        cancel_send=rng.choice((0.0, 0.2, 0.6)) if takes_back else habits.cancel_send,
        cancel_receive=rng.choice((0.0, 0.2, 0.6)) if takes_back else habits.cancel_receive,
    )
    return _talker(rng, index, habits) if theme is Theme.TALK else habits


def _talker(rng: Random, index: int, habits: Habits) -> Habits:
    """Who asks always has room for an answer; who answers is slow to read, so that request and room wait for credit.

    And says little: a SinkAvail goes only where nothing else stands before the bytes that it asks for.
    """
    habits = replace(habits, modes=(Mode.PIPELINED,))
    if index == 0:
        return replace(
            habits,
            total=2 * habits.total,
            urgent=0.0,
            receive_gap=0.0,
            waitall=0.0,
            cancel_receive=rng.choice((0.0, 0.0, 0.0, 0.2)),
        )
    return replace(
        habits,
        send_gap=rng.choice((0.5, 0.9)),
        cancel_send=rng.choice((0.0, 0.0, 0.4)),
        send_window=1,
        receive_gap=rng.choice((0.7, 1.0)),
        receive_window=1,
        pause_s=rng.choice(((1e-5, 3e-4), (1e-4, 1e-3), (1e-4, 1e-3))),
        wish=1.0,
    )


def _bounded(habits: Habits, other: SdpSettings) -> Habits:
    """No more than a hundred messages each way, if all goes by Bcopy."""
    return replace(habits, total=min(habits.total, _MESSAGES_MAX * (other.receive_size - 16)))


def _size(rng: Random) -> int:
    least = limits.SDP_BUFFER_SIZE_MIN
    return rng.choice(
        (least, least + 1, rng.randint(least, 100), rng.randint(64, 600), rng.randint(64, 600), 4096, 32784, 40000)
    )


def _strategy(rng: Random, size: int) -> partial[Strategy]:
    bcopy_max = rng.choice((0, 1, 16, 100, 100, 500, 2000, _NEVER))
    return partial(
        Strategy,
        bcopy_max=bcopy_max,
        read_min=rng.choice((1, 1, 16, 300, _NEVER)),
        sink_min=rng.choice((None, 1, 1, size + 1, 2 * size)),
        advert_max=rng.choice((50, 300, 1000, 1 << 20)),
        adverts_in_flight=rng.choice((1, 2, 8)),
        payload=rng.choice((1, 1, 20, 64)),
        transactions=rng.random() < 0.7,
        pipelined=rng.random() < 0.8,
        refusals=rng.choice((1, 2, 4, 1000)),
        rest=rng.choice((1, 8, 64)),
    )


def _habits(rng: Random) -> Habits:
    often = partial(_sometimes, rng)
    scale = rng.choice((1, 40, 200, 200, 1000, 6000))
    return Habits(
        total=0 if rng.random() < 0.05 else int(scale * rng.uniform(0.5, 12)),
        send_sizes=tuple(max(1, int(scale * rng.uniform(0.02, 4))) for _ in range(rng.choice((1, 2, 4)))),
        send_window=rng.choice((1, 1, 2, 3, 8)),
        send_gap=often(0.5),
        urgent=often(0.3) if rng.random() < 0.3 else 0.0,
        bcopy_only=often(0.3) if rng.random() < 0.2 else 0.0,
        cancel_send=often(0.5) if rng.random() < 0.3 else 0.0,
        receive_sizes=tuple(max(1, int(scale * rng.uniform(0.05, 8))) for _ in range(rng.choice((1, 2, 4)))),
        receive_window=rng.choice((1, 1, 2, 4, 8)),
        receive_gap=often(0.6),
        waitall=rng.choice((0.0, 0.0, 0.3, 1.0)),
        cancel_receive=often(0.5) if rng.random() < 0.3 else 0.0,
        peek=often(0.5) if rng.random() < 0.2 else 0.0,
        waits_for_readable=rng.random() < 0.3,
        pause_s=rng.choice(((0.0, 0.0), (1e-6, 1e-5), (1e-6, 1e-3))),
        long_pause_s=rng.choice(((1e-3, 1e-2), (0.1, 3.0))),
        long_pauses=rng.choice((0.0, 0.1, 0.3)),
        starts_early=rng.random() < 0.5,
        batches=rng.choice((0.0, 0.5, 0.9)),
        reenters=rng.choice((0.0, 0.5, 1.0)),
        wish=rng.choice((0.0, 0.0, 0.1, 0.4)),
        modes=tuple(Mode),
        resizes=tuple(_size(rng) for _ in range(3)) if rng.random() < 0.2 else (),
        closes_at_once=rng.random() < 0.5,
    )


def _sometimes(rng: Random, chance: float) -> float:
    return chance if rng.random() < 0.5 else 0.0
