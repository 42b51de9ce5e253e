"""The gain of carrying a connection to another host, rather than leaving it on TCP: time, by a transport's profile.

On a device in software a message costs less than a system call on TCP, since a ring gathers messages. But each byte is
copied more often, and whenever an application waits for the other one's answer (a *turn*), the bytes pass through more
hands. So streams of small messages gain, and conversations lose.
"""

from __future__ import annotations

from typing import Final, NamedTuple, Self

from sidestep.errors import Misuse

ALWAYS: Final = "always"
BY_GAIN: Final = "gain"
_FIGURE_MAX: Final = 1e6


class Traffic(NamedTuple):
    """Traffic of a connection over some time, as one of its ends has seen it."""

    messages: int  # calls that sent or received some
    bytes: int  # both ways
    turns: int  # times that it received after it had sent

    def __str__(self) -> str:
        return f"{self.messages} messages of {self.bytes / 1024:.1f} KiB together in {self.turns} turns"


class Profile(NamedTuple):
    """Microseconds, each on average, against TCP on the same way."""

    message_us: float  # gained with each message
    mib_us: float  # lost with each MiB
    turn_us: float  # lost with each turn

    def gain_us(self, traffic: Traffic) -> float:
        """Gained by carrying such traffic; less than 0: lost."""
        lost = traffic.bytes / (1 << 20) * self.mib_us + traffic.turns * self.turn_us
        return traffic.messages * self.message_us - lost

    @property
    def nanoseconds(self) -> tuple[int, int, int]:
        """Figures in the form for shims, for which nothing gained with a message is no profile."""
        return max(1, round(self.message_us * 1000)), round(self.mib_us * 1000), round(self.turn_us * 1000)

    @classmethod
    def parse(cls, text: str) -> Self:
        """`MESSAGE:MIB:TURN`, as `str` gives it; raises Misuse."""
        try:
            message, mib, turn = map(float, text.split(":"))
        except ValueError as error:
            raise Misuse(
                f"{text!r} is not '{BY_GAIN}', '{ALWAYS}' or three figures",
                remedy="measure them: 'sidestep rdma profile'",
            ) from error
        if not all(0 <= each <= _FIGURE_MAX for each in (message, mib, turn)):
            raise Misuse(f"{text!r}: figures are microseconds, of 0 to {_FIGURE_MAX:.0f} each")
        return cls(message, mib, turn)

    def __str__(self) -> str:
        return f"{self.message_us:g}:{self.mib_us:g}:{self.turn_us:g}"


class Profiles(NamedTuple):
    """Profiles of a transport, by the code that carries ordinary messages; None: all that goes over it gains."""

    engine: Profile | None
    python: Profile | None


# Two namespaces of a machine with two processors, quiet: what `sidestep rdma profile` gave for each transport.
IWARP: Final = Profiles(
    engine=Profile(message_us=7, mib_us=300, turn_us=80), python=Profile(message_us=6, mib_us=9000, turn_us=700)
)
ROCE: Final = Profiles(
    engine=Profile(message_us=5, mib_us=1100, turn_us=30), python=Profile(message_us=0, mib_us=100_000, turn_us=1800)
)
VERBS: Final = Profiles(engine=None, python=None)  # a guess: an adapter is made to be faster at conversations, too
