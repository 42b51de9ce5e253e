"""A copy of the source tree with a library and an environment of its own: for faults, and for instrumented code."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
LEFT_OUT: Final = {".git", ".venv", "build", "dist", "__pycache__", ".hypothesis"}
LEFT_OUT_ENDS: Final = ("_cache", ".egg-info", ".so", ".new")
STAMPS: Final = (".core", ".dependencies", ".installed")  # what the Makefile looks at, the oldest first


def source_files(root: Path) -> Iterator[Path]:
    """Every file of the tree that is not made from others, relative to `root`."""
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in LEFT_OUT and not name.endswith(LEFT_OUT_ENDS))
        for name in sorted(files):
            if not name.endswith(LEFT_OUT_ENDS) and name != "sidestep-loader":
                yield (Path(folder) / name).relative_to(root)


def _same(one: Path, other: Path) -> bool:
    """By content: the time of a copy is that of its making, as ninja wants it."""
    if one.is_symlink() or other.is_symlink():
        return one.is_symlink() and other.is_symlink() and one.readlink() == other.readlink()
    if not other.exists():
        return False
    ours, theirs = one.stat(), other.stat()
    alike = (ours.st_size, ours.st_mode) == (theirs.st_size, theirs.st_mode)
    return alike and one.read_bytes() == other.read_bytes()


class SourceCopy:
    """The copy below build/, brought up to date by each `update`."""

    def __init__(self, name: str, meson_options: Sequence[str] = (), *, source: Path = ROOT) -> None:
        self.root, self._source = ROOT / "build" / name, source
        self.python = self.root / ".venv" / "bin" / "python"
        self._meson_options = meson_options

    def update(self) -> None:
        """Copies what has changed; makes the environment the first time; compiles."""
        wanted = set(source_files(self._source))
        for path in wanted:
            if not _same(self._source / path, self.root / path):
                (self.root / path).parent.mkdir(parents=True, exist_ok=True)
                self._copy(path)
        for path in set(source_files(self.root)) - wanted:
            (self.root / path).unlink()
        if not self._has_environment():
            self._make_environment()
        for name in STAMPS:
            (self.root / ".venv" / name).touch()
        if not (self.root / "build/native/build.ninja").exists():
            self._run(self.python.with_name("meson"), "setup", *self._meson_options, "build/native")
        self.compile()

    def _copy(self, path: Path) -> None:
        target = self.root / path
        target.unlink(missing_ok=True)
        shutil.copy(self._source / path, target, follow_symlinks=False)

    def compile(self) -> None:
        """Makes the library anew, as far as C files have changed."""
        self._run("make", "--no-print-directory", "library")

    def environment(self, **more: str) -> dict[str, str]:
        """For programs that run in the copy."""
        path = f"{self.python.parent}:{os.environ.get('PATH', os.defpath)}"
        return {**os.environ, "PATH": path, "PYTHONDONTWRITEBYTECODE": "", **more}

    def _has_environment(self) -> bool:
        """Whether it has what ours has: packages may have come since."""
        ours, made = ROOT / ".venv" / STAMPS[-1], self.root / ".venv" / ".made"
        return made.exists() and made.stat().st_mtime > ours.stat().st_mtime

    def _make_environment(self) -> None:
        """Links to the files of our own environment: in a second, and without a byte of disk."""
        ours, theirs = ROOT / ".venv", self.root / ".venv"
        partial = theirs.with_name(".venv.new")
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(ours, partial, symlinks=True, copy_function=os.link, ignore=shutil.ignore_patterns(".lock"))
        for path in [*partial.glob("bin/*"), *partial.glob("lib/*/site-packages/sidestep-source.pth")]:
            content = path.read_bytes()
            if (not path.is_symlink() and str(ours).encode() in content) or path.suffix == ".pth":
                path.unlink()
                path.write_bytes(content.replace(str(ROOT).encode(), str(self.root).encode()))
                path.chmod(0o755)
        for name in STAMPS:  # the originals keep their times
            (partial / name).unlink(missing_ok=True)
        (partial / ".made").touch()
        shutil.rmtree(theirs, ignore_errors=True)
        partial.rename(theirs)

    def _run(self, *command: str | Path) -> None:
        done = subprocess.run(
            command, cwd=self.root, env=self.environment(), capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(
                f"{' '.join(map(str, command))} in {self.root}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
            )
