"""Policy files as they lie on disk, and the users and groups of this machine."""

from __future__ import annotations

import glob
import grp
import os
import pwd
import stat
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Final

from sidestep import limits
from sidestep.errors import LimitReached, Unavailable

_MODE: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK  # a pipe must not make the provider wait
_NULL: Final = os.makedev(1, 3)  # /dev/null: an empty file, by which a user says "no policy of mine"
_WRITABLE: Final = stat.S_IWGRP | stat.S_IWOTH


class DiskFiles:
    """Reads policy files.

    With `owners` a file is read only if it and every directory above it belong to them, and only they can write to it.
    An ordinary user must not change rules for all users.
    """

    def __init__(self, owners: frozenset[int] | None = None) -> None:
        self._owners = owners

    def read(self, path: Path, size_max: int) -> bytes | None:
        """The bytes of a file, None if there is none.

        Raises:
            Unavailable: It cannot be read, or must not be trusted.
            LimitReached: It is longer than `size_max`.
        """
        try:
            fd = os.open(path, _MODE)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise _unreadable(path, error) from error
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) and found.st_rdev != _NULL:
                what = "a directory" if stat.S_ISDIR(found.st_mode) else "not a file"
                remedy = f"include {path}/*.conf" if stat.S_ISDIR(found.st_mode) else "give the name of a file"
                raise Unavailable(f"{path} is {what}", remedy=remedy)
            if self._owners is not None and found.st_rdev != _NULL:
                self._check_owner(path, found)
                for directory in Path(os.path.realpath(path)).parents:
                    self._check_owner(directory, directory.stat())
            with os.fdopen(fd, "rb", closefd=False) as file:
                data = file.read(size_max + 1)
        except OSError as error:
            raise _unreadable(path, error) from error
        finally:
            os.close(fd)
        if len(data) > size_max:
            raise LimitReached(
                f"{path} makes the policy longer than {limits.POLICY_BYTES_MAX} bytes", remedy="is it a policy file?"
            )
        return data

    def expand(self, directory: Path, pattern: str, count_max: int) -> list[Path]:
        """The files below `directory` that a glob matches, in order."""
        names = islice(glob.iglob(pattern, root_dir=directory), count_max)  # noqa: PTH207 - of Path.glob there is none that takes `..`
        return [directory / name for name in sorted(names)]

    def _check_owner(self, path: Path, found: os.stat_result) -> None:
        if self._owners is not None and found.st_uid not in self._owners:
            raise Unavailable(
                f"{path} belongs to user {found.st_uid}, who would decide for all", remedy=f"chown root {path}"
            )
        if found.st_mode & _WRITABLE:
            raise Unavailable(f"others than the owner of {path} can write to it", remedy=f"chmod go-w {path}")


class DiskNames:
    """The users and groups of this machine."""

    def uid(self, name: str) -> int | None:
        return _look_up(lambda: pwd.getpwnam(name).pw_uid)

    def gid(self, name: str) -> int | None:
        return _look_up(lambda: grp.getgrnam(name).gr_gid)


def _look_up(find: Callable[[], int]) -> int | None:
    try:
        return find()
    except KeyError:
        return None


def _unreadable(path: Path, error: Exception) -> Unavailable:
    why = error.strerror if isinstance(error, OSError) else str(error)
    return Unavailable(f"{path} cannot be read: {why}", remedy=f"make it readable for uid {os.geteuid()}")
