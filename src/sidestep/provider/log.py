"""The provider's log: so many lines a minute from each writer, so that none silences the news of others.

Clients share `LOG_LINES_MAX`, of which a user has the part that the rules among users leave; the provider and the
modules have as many each. Lines that are left out are counted, and the count is written when the minute is over.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from enum import Enum
from typing import Final

from sidestep import limits


class Source(Enum):
    """Writer that is no client."""

    PROVIDER = "of the provider"
    MODULES = "of modules"


_OTHERS: Final = "of other users"  # users that had no line yet when there was no room for any: counted together
Writer = Source | int  # a source, or the uid of a client


def to_stderr(line: str) -> None:
    """Writes a line for the process that started the provider, which keeps what is worth keeping."""
    print(line, file=sys.stderr, flush=True)  # noqa: T201 - stderr is the log


def to_file(line: str) -> None:
    """Writes a line to stderr, a file that nobody else cuts: it begins anew when it is long."""
    if os.fstat(sys.stderr.fileno()).st_size > limits.LOG_FILE_MAX:
        os.ftruncate(sys.stderr.fileno(), 0)
    to_stderr(line)


class Log:
    """Writes lines; the time is the caller's."""

    def __init__(self, prefix: str, *, share: Callable[[int, int], int], write: Callable[[str], None]) -> None:
        """`share`: how many of so many lines a user may have."""
        self._prefix = prefix
        self._share = share
        self._write = write
        self._minute_over: float | None = None  # time; None: nothing was written since the last one
        self._written: Counter[Writer] = Counter()
        self._clients_written = 0
        self._left_out: Counter[str] = Counter()

    def add(self, text: str, writer: Writer, *, now: float) -> None:
        """Writes the lines of one writer, as far as there is room in this minute."""
        self.handle_timeouts(now)
        if self._minute_over is None:
            self._minute_over = now + limits.LOG_MINUTE_S
        for line in text.rstrip().splitlines():
            if self._room(writer):
                self._written[writer] += 1
                self._clients_written += not isinstance(writer, Source)
                self._write(f"{self._prefix}: {line}")
            else:
                self._left_out[self._whose(writer)] += 1

    def next_deadline(self) -> float | None:
        """Time at which the minute is over; None while nothing was left out."""
        return self._minute_over if self._left_out else None

    def handle_timeouts(self, now: float) -> None:
        """Writes how many lines were left out, once the minute is over."""
        if self._minute_over is None or now < self._minute_over:
            return
        for whose, count in self._left_out.items():
            self._write(f"{self._prefix}: {count:,} lines {whose} were left out (LOG_LINES_MAX)")
        self._minute_over = None
        self._written.clear()
        self._clients_written = 0
        self._left_out.clear()

    def _room(self, writer: Writer) -> bool:
        written = self._written[writer]
        if isinstance(writer, Source):
            return written < limits.LOG_LINES_MAX
        return written < self._share(limits.LOG_LINES_MAX, writer) and self._clients_written < limits.LOG_LINES_MAX

    def _whose(self, writer: Writer) -> str:
        if isinstance(writer, Source):
            return writer.value
        return f"of user {writer}" if self._written[writer] else _OTHERS
