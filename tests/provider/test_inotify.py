"""The kernel's word on directories."""

from __future__ import annotations

import errno
import os
import select
from pathlib import Path

import pytest
from common import PATIENCE_S

from sidestep.provider.inotify import Inotify, Mask


def test_what_happens_to_entries_is_told_in_order_and_by_name(tmp_path: Path) -> None:
    with Inotify() as inotify:
        number = inotify.add_watch(tmp_path, Mask.CREATE | Mask.CLOSE_WRITE | Mask.DELETE)
        assert inotify.events() == []
        name = os.fsdecode(b"caf\xe9" * 60)  # not UTF-8, and of a length to which the kernel adds zeros
        (tmp_path / name).write_text("x")
        (tmp_path / "b").mkdir()
        (tmp_path / name).unlink()
        assert select.select([inotify], [], [], PATIENCE_S)[0]
        found = inotify.events()
    assert [(one.number, one.mask & ~Mask.ISDIR, one.name) for one in found] == [
        (number, Mask.CREATE, name), (number, Mask.CLOSE_WRITE, name), (number, Mask.CREATE, "b"),
        (number, Mask.DELETE, name),
    ]  # fmt: skip


def test_a_watch_that_is_given_up_is_said_to_be_and_is_no_more(tmp_path: Path) -> None:
    with Inotify() as inotify:
        number = inotify.add_watch(tmp_path, Mask.CREATE)
        inotify.rm_watch(number)
        (tmp_path / "a").touch()
        assert [(one.number, one.mask, one.name) for one in inotify.events()] == [(number, Mask.IGNORED, "")]
        with pytest.raises(OSError, match="inotify_rm_watch") as error:
            inotify.rm_watch(number)
        assert error.value.errno == errno.EINVAL


def test_what_cannot_be_watched_raises_and_programs_inherit_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with Inotify() as inotify:
        assert not os.get_inheritable(inotify.fileno())
        for path, kind in ((tmp_path / "none", FileNotFoundError), (tmp_path / "file", NotADirectoryError)):
            with pytest.raises(kind, match="inotify_add_watch"):
                inotify.add_watch(path, Mask.CREATE | Mask.ONLYDIR)
    with pytest.raises(ValueError, match="closed"):
        inotify.fileno()
