"""The work of `sidestep run` once its command line is known; it loads as little as it can."""

from __future__ import annotations

import os
import signal
import sys

from sidestep import places
from sidestep.errors import Unavailable
from sidestep.observe import preload_check as reach
from sidestep.places import ShimSettings

EXIT_UNSUITED = 125  # an exit code of our own, as env and timeout have it
EXIT_NOT_EXECUTABLE = 126  # the exit code of env and the shell
EXIT_NOT_FOUND = 127
_ASAN_OPTION = "verify_asan_link_order=0"  # first: the program's own word, if it has one, comes later and decides


def start(
    command: list[str], settings: ShimSettings | None = None, *, require: bool = False, stats: bool = False
) -> None:
    """Goes on as `command`, under the shim; does not return.

    Args:
        command: The program and its arguments.
        settings: Of the shim; None: those of the environment, which holds them already below another `sidestep run`.
        require: Not on plain TCP.
        stats: As its parent, which says at the end what was saved.
    """
    env = dict(os.environ)
    log = None
    if settings is not None or not _is_under_shim():
        settings = settings or ShimSettings(places.socket_path())
        log = _log_file()
        try:
            env = settings.environment(env)
            if not places.answers(settings.socket):
                _start_provider(settings.socket, log)
        except Unavailable as error:
            _warn(f"{command[0]} is not started: {error}" if require else f"plain TCP for now: {error}")
            if require:
                sys.exit(EXIT_UNSUITED)
    program = reach.which(command[0])
    found = reach.inspect(program) if program else None
    obstacles = found.obstacles if found else ()
    for obstacle in obstacles:
        text = f"{command[0]} {obstacle.verdict}; {obstacle.remedy}"
        _warn(text) if obstacle.stops_it or require else _note(text, log)
    if require and any(not obstacle.stops_it for obstacle in obstacles):
        sys.exit(EXIT_UNSUITED)
    if _move_is_fatal():
        env[places.ENV_STAY] = "1"
    if program and os.access(program, os.R_OK) and reach.is_address_sanitized(program):
        env["ASAN_OPTIONS"] = ":".join(filter(None, [_ASAN_OPTION, env.get("ASAN_OPTIONS", "")]))
    if any(obstacle.forbids_it for obstacle in obstacles):
        env = dict(os.environ)
    signals = _not_ignored()
    if settings is not None and stats:
        from pathlib import Path

        from sidestep.cli.run_stats import stay_as_parent

        stay_as_parent(Path(settings.socket))
    for number in signals:
        signal.signal(number, signal.SIG_DFL)
    try:
        argv = found.argv(command) if found else command
        os.execvpe(argv[0], argv, env)  # noqa: S606 - starting the user's program is the job
    except OSError as error:
        if isinstance(error, FileNotFoundError) and program is None:
            _warn(f"{command[0]} is not found")
            sys.exit(EXIT_NOT_FOUND)
        if not any(obstacle.stops_it for obstacle in obstacles):
            why = "its loader is not found" if isinstance(error, FileNotFoundError) else error.strerror
            _warn(f"{command[0]} cannot be executed: {why}")
        sys.exit(EXIT_NOT_EXECUTABLE)


def _not_ignored() -> list[signal.Signals]:
    """Signals that Python ignores and our parent does not.

    Python does not show what they were before it started. A shell or service manager that has a program ignore one does
    so itself.
    """
    try:
        fields = dict(line.split(":", 1) for line in _status(os.getppid()).splitlines())
        ignored = int(fields["SigIgn"], 16)
    except (OSError, KeyError):  # state hidden from here
        return []
    return [number for number in (signal.SIGPIPE, signal.SIGXFSZ) if not ignored >> (number - 1) & 1]


def _status(pid: int | str) -> str:
    with open(f"/proc/{pid}/status", encoding="utf-8", errors="surrogateescape") as file:
        return file.read()


def _move_is_fatal() -> bool:
    """True if a seccomp filter, such as systemd's SystemCallFilter=, kills a child that changes its CPUs."""
    if "\nSeccomp:\t2" not in _status("self"):
        return False
    if (child := os.fork()) == 0:
        try:
            os.sched_setaffinity(0, os.sched_getaffinity(0))
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def _is_under_shim() -> bool:
    """True if this process has the shim of this installation, and its provider answers: CMD needs an exec only."""
    if places.ENV_LOG in os.environ:  # run checks that the log can be written
        return False
    path = os.environ.get(places.ENV_SOCKET, "")
    as_root = os.environ.get(places.ENV_FROM_ROOT) == "1"
    preloaded = os.environ.get("LD_PRELOAD", "").replace(":", " ").split()
    if not path.startswith("/") or as_root != (os.geteuid() == 0) or places.native_library() not in preloaded:
        return False
    try:
        return places.answers(path)
    except places.NotBelieved:  # the way of all others explains that
        return False


def _start_provider(path: str, log: str | None) -> None:
    from pathlib import Path

    from sidestep.observe import other_users
    from sidestep.provider import control
    from sidestep.settings import ProviderSettings, policy_places

    started = control.start(ProviderSettings(Path(path), policy=policy_places(os.environ)))
    if started and (left_out := other_users.warning(Path(path))):  # a warning once, and not with every program
        _note(left_out, log)


def _log_file() -> str | None:
    try:
        return places.log_file(os.environ)
    except Unavailable as error:
        _warn(str(error))
        return None


def _note(text: str, log: str | None) -> None:
    """Reports a lasting cause: to a terminal and the log, but not into the output of a program."""
    if sys.stderr.isatty():
        _warn(text)
    if log is not None:
        descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)  # like the shim
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(f"{os.getpid()} {text}\n")


def _warn(text: str) -> None:
    print(f"sidestep: {text}", file=sys.stderr)  # noqa: T201 - click is not loaded
