"""Follows files that may not exist yet: reports that one of them may have changed, and costs nothing meanwhile.

The kernel (inotify) watches directories, not files: editors replace files, so a file that is watched itself is soon
another program's backup. A directory is watched if its entries decide which file a path leads to. These are the file's
directory, that of every symbolic link on the way, and the last directory that exists while something is missing. Only
events about the names in question are reported.

Not noticed: a change that the kernel does not see, as on another host's end of a network file system.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from glob import escape
from pathlib import Path
from typing import Final

from sidestep import limits
from sidestep.policy.load import Glob
from sidestep.policy.model import is_glob
from sidestep.provider.inotify import Inotify, Mask

_OF_ITSELF: Final = Mask.DELETE_SELF | Mask.MOVE_SELF | Mask.ONLYDIR
_OF_ENTRIES: Final = (
    _OF_ITSELF | Mask.CREATE | Mask.MOVED_TO | Mask.MOVED_FROM | Mask.DELETE | Mask.CLOSE_WRITE | Mask.ATTRIB
)
_LINKS_MAX: Final = 40  # links on the way to a file, as in the kernel


@dataclass(slots=True)
class _Interest:
    """Names that matter in a directory."""

    names: set[str] = field(default_factory=set)  # names of entries, as globs
    number: int = -1  # the kernel's, of this watch

    @property
    def mask(self) -> int:
        return int(_OF_ENTRIES if self.names else _OF_ITSELF)


class FileWatch:
    """A set of paths and globs."""

    def __init__(self) -> None:
        """Raises OSError if the kernel has no more watches for this user."""
        self._inotify = Inotify()
        self._directories: dict[Path, _Interest] = {}
        self._by_number: dict[int, Path] = {}
        self.blind: str | None = None  # reason why some change would not be noticed

    def fileno(self) -> int:
        """Readable when `handle_readable` has something to do."""
        return self._inotify.fileno()

    def close(self) -> None:
        self._inotify.close()

    def follow(self, paths: Iterable[Path], globs: Iterable[Glob] = ()) -> bool:
        """Watches these paths and no others; whether something new is watched, which may have changed before."""
        wanted: dict[Path, _Interest] = {}
        ways = [_literally(path.absolute()) for path in paths]
        for start, pattern in globs:
            before = [] if Path(pattern).is_absolute() else _literally(start.absolute())
            ways.append(before + [(part, is_glob(part)) for part, _ in _literally(Path(pattern))])
        for way in ways:
            for directory, name in _way(Path("/"), way):
                interest = wanted.setdefault(directory, _Interest())
                if name is not None:
                    interest.names.add(name)
        self.blind = None
        for directory in self._directories.keys() - wanted.keys():
            self._forget(directory)
        fresh = [self._watch(directory, interest) for directory, interest in wanted.items()]
        return any(fresh)

    def handle_readable(self) -> bool:
        """Takes in the kernel's events; returns whether a path may lead elsewhere, or its file has changed."""
        found = False
        for event in self._inotify.events():
            if event.mask & Mask.Q_OVERFLOW:
                found = True
                continue
            directory = self._by_number.get(event.number)
            if directory is None:  # an event of a watch that was removed
                continue
            if event.mask & (Mask.IGNORED | Mask.MOVE_SELF):  # another file may have its name, and the entries below it
                for below in [known for known in self._directories if known.is_relative_to(directory)]:
                    self._forget(below)
                found = True
            elif self._matters(directory, event.name, event.mask):
                found = True
        return found

    def _matters(self, directory: Path, name: str, mask: int) -> bool:
        if not name:
            return True
        interest = self._directories.get(directory)
        if interest is None or not any(fnmatchcase(name, wanted) for wanted in interest.names):
            return False
        return not mask & Mask.CREATE or _complete(directory / name)

    def _watch(self, directory: Path, interest: _Interest) -> bool:
        """Watches a directory; whether more of it than before."""
        known = self._directories.get(directory)
        if known is not None and known.mask == interest.mask:
            known.names = interest.names  # events that the kernel has reported meanwhile are judged by these as well
            return False
        if len(self._directories) >= limits.POLICY_WATCHES_MAX:
            self.blind = f"more than {limits.POLICY_WATCHES_MAX} directories would have to be watched"
            return False
        if known is not None:
            self._forget(directory)
        try:
            interest.number = self._inotify.add_watch(directory, interest.mask)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR):  # the directory has just gone; follow the path again
                return True
            if interest.names:
                self.blind = f"{directory} cannot be watched: {error.strerror}"
            return False  # a directory above, which others may not read: only that it is renamed goes unnoticed
        self._by_number[interest.number] = directory
        self._directories[directory] = interest
        return True

    def _forget(self, directory: Path) -> None:
        interest = self._directories.pop(directory)
        del self._by_number[interest.number]
        try:
            self._inotify.rm_watch(interest.number)
        except OSError as error:
            if error.errno != errno.EINVAL:  # the kernel has given it up already
                raise


_Step = tuple[str, bool]  # a part of a path, and whether it is a glob


def _way(directory: Path, steps: list[_Step], links_left: int = _LINKS_MAX) -> Iterator[tuple[Path, str | None]]:
    """The directories on the way from `directory`, and which of their entries, as a glob, decides; None: none does."""
    while steps:
        (name, is_glob), *steps = steps
        if name == "..":
            directory = directory.parent
            continue
        if is_glob:
            yield directory, name
            if steps:
                for match in _entries(directory, name):
                    yield from _way(directory, [(match, False), *steps], links_left)
            return
        entry = directory / name
        try:
            found = entry.lstat()
            target = Path(os.readlink(entry)) if stat.S_ISLNK(found.st_mode) else None  # noqa: PTH115 - as written
        except OSError:
            yield directory, escape(name)
            return
        if target is not None:
            yield directory, escape(name)
            if not links_left:
                return
            links_left -= 1
            if target.is_absolute():
                directory = Path(target.anchor)
            steps = _literally(target) + steps
        elif steps and stat.S_ISDIR(found.st_mode):
            yield directory, None
            directory = entry
        else:
            yield directory, escape(name)
            return


def _literally(path: Path) -> list[_Step]:
    return [(part, False) for part in path.parts if part != path.anchor]


def _entries(directory: Path, pattern: str) -> list[str]:
    try:
        return [name for name in os.listdir(directory) if fnmatchcase(name, pattern)]  # noqa: PTH208 - names
    except OSError:
        return []


def _complete(path: Path) -> bool:
    """True if a new entry is complete: a file that is being written is not, and its close makes an event."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return not stat.S_ISREG(found.st_mode) or found.st_nlink > 1
