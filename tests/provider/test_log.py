"""The provider's log: who has how many lines a minute, and what is told of the rest."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from sidestep import limits
from sidestep.provider.log import Log, Source, Writer, to_file

WHOLE = limits.LOG_LINES_MAX
SHARE = WHOLE // limits.USER_SHARE


class Written:
    """A log, and its lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.log = Log("p", share=lambda whole, uid: whole if uid == 0 else whole // limits.USER_SHARE,
                       write=self.lines.append)  # fmt: skip

    def add(self, count: int, writer: Writer, now: float = 0.0) -> int:
        """How many of so many lines were written."""
        before = len(self.lines)
        self.log.add("\n".join(["x"] * count), writer, now=now)
        return len(self.lines) - before


@pytest.mark.parametrize(
    ("writer", "room"), [(1000, SHARE), (0, WHOLE), (Source.PROVIDER, WHOLE), (Source.MODULES, WHOLE)]
)
def test_each_has_a_bound_of_its_own(writer: Writer, room: int) -> None:
    written = Written()
    assert written.add(room + 1, writer) == room
    assert written.add(1, writer) == 0
    others: set[Writer] = {Source.PROVIDER, Source.MODULES}
    for other in others - {writer}:
        assert written.add(1, other) == 1


def test_what_was_left_out_is_told_when_the_minute_is_over() -> None:
    written = Written()
    written.add(SHARE, 1000)
    assert written.log.next_deadline() is None  # nobody is woken for nothing
    written.add(3, 1000)
    written.add(1, Source.PROVIDER)
    assert written.log.next_deadline() == limits.LOG_MINUTE_S
    written.log.handle_timeouts(limits.LOG_MINUTE_S - 1)
    assert len(written.lines) == SHARE + 1
    written.log.handle_timeouts(limits.LOG_MINUTE_S)
    assert written.lines[-1] == "p: 3 lines of user 1000 were left out (LOG_LINES_MAX)"
    assert written.log.next_deadline() is None
    assert written.add(SHARE + 1, 1000, limits.LOG_MINUTE_S) == SHARE


def test_a_new_minute_begins_with_the_next_line() -> None:
    written = Written()
    written.add(SHARE + 1, 1000)
    assert written.add(1, 1000, limits.LOG_MINUTE_S) == 2  # what was left out, and the line
    assert written.add(SHARE, 1000, limits.LOG_MINUTE_S + 1) == SHARE - 1


def test_many_users_have_no_more_than_all_clients_and_no_line_each_for_what_was_left_out() -> None:
    """A user with a user namespace can be as many users as that has."""
    written = Written()
    assert sum(written.add(1, uid) for uid in range(1, 10 * WHOLE)) == WHOLE
    assert written.add(1, Source.PROVIDER) == 1
    before = len(written.lines)
    written.log.handle_timeouts(limits.LOG_MINUTE_S)
    assert written.lines[before:] == [f"p: {9 * WHOLE - 1:,} lines of other users were left out (LOG_LINES_MAX)"]


def test_the_file_of_a_provider_in_the_background_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LOG_FILE_MAX", 20)
    with open(os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), "w", encoding="ascii") as file:
        monkeypatch.setattr(sys, "stderr", file)
        for line in ("one", "two", "a line that is long", "news"):
            to_file(line)
    assert (tmp_path / "log").read_text(encoding="ascii") == "news\n"
