"""Errors of sidestep, by the party that must act. Each carries what happened and, where there is one, the remedy.

Words that messages share are here, too.
"""

from __future__ import annotations

TYPE_CHECKING = False  # see places.py
if TYPE_CHECKING:
    from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A question that names the known words that are close to `word`; empty if none is."""
    import difflib  # an error is where it is needed

    close = difflib.get_close_matches(word, sorted(set(known)))
    return f"did you mean {' or '.join(close)}?" if close else ""


def counted(number: int, noun: str) -> str:
    """A number with its noun, as in "1 program" or "2,000 processes"."""
    plural = "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{'' if number == 1 else plural}"


class SidestepError(Exception):
    """Base of all errors of sidestep; `remedy` says what to do, or is empty."""

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message}; {self.remedy}" if self.remedy else self.message


class Misuse(SidestepError):
    """The caller must act: a wrong argument, or a call at the wrong time."""


class PeerViolation(SidestepError):
    """The other end broke a rule; `rule` names it for counters and logs."""

    def __init__(self, message: str, *, rule: str) -> None:
        super().__init__(message)
        self.rule = rule

    def __str__(self) -> str:
        return f"{super().__str__()} [{self.rule}]"


class Rules(dict[str, str]):
    """The rules of a protocol, by the name that a violation of one has."""

    def broken(self, rule: str, found: str) -> PeerViolation:
        return PeerViolation(f"{found}: {self[rule]}", rule=rule)


class LimitReached(SidestepError):
    """A bound of limits.py."""


class Unavailable(SidestepError):
    """The error of a missing part; the next way, at worst plain TCP, may be tried."""


class InternalError(SidestepError):
    """A fault of sidestep itself."""
