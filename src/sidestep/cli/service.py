"""`sidestep service` and `bundle`: bring the shim into services that systemd starts, and into a root without glibc."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import click

from sidestep import bundle as bundles
from sidestep import config
from sidestep.cli.group import Group
from sidestep.cli.options import json_option, together
from sidestep.cli.shown import show
from sidestep.errors import Misuse, Unavailable
from sidestep.installation import loader_needed
from sidestep.observe import other_users, preload_check
from sidestep.observe.units import Units, wanted

CommandT = TypeVar("CommandT", bound=Callable[..., Any])


@click.group(cls=Group)
def service() -> None:
    """Run services of systemd under sidestep, by a drop-in beside their units.

    UNIT is a service's name or alias, with or without .service. It comes under sidestep, or leaves it, when it is
    restarted.
    """


_units_options = together(
    click.option("--user", is_flag=True, help="Services of your own, which your `systemctl --user` starts."),
    click.option(
        "--root",
        type=click.Path(path_type=Path, exists=True, file_okay=False),
        metavar="DIRECTORY",
        help="Services of the system in this directory, such as an image that is being made.",
    ),
)


def _units(user: bool, root: Path | None) -> Units:
    if user and root:
        raise Misuse("--user and --root do not go together", remedy="give one of them")
    return Units(user, root.absolute() if root else Path("/"))


@service.command()
@click.argument("unit")
@click.option("--dry-run", is_flag=True, help="Print the drop-in, say where it would go, and change nothing.")
@click.option("--restart", is_flag=True, help="Restart the service, so that it is under sidestep at once.")
@_units_options
def enable(unit: str, dry_run: bool, restart: bool, user: bool, root: Path | None) -> None:
    """Write the drop-in of UNIT. It allows what the service's sandbox denies to sidestep; each such line is shown."""
    units = _units(user, root)
    found = units.find(unit)
    socket = config.socket_path() if user else config.SYSTEM_SOCKET
    made, path = wanted(units, found, socket), units.drop_in(found.name)
    for note in made.notes:
        _say(f"{found.name}: {note}")
    if dry_run:
        _say(f"would be {path}")
        click.echo(made.text, nl=False)
        return
    served = config.answers(socket)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(made.text, encoding="utf-8")
    except OSError as error:
        raise _refused(path, error) from error
    _say(f"{found.name}: wrote {path}")
    if root is None and not served:
        command = "your provider: sidestep provider start --idle-exit 0" if user else other_users.remedy()
        _say(f"no provider answers at {socket}; until then the service stays on TCP. Start {command}")
    _reread(units, found.name, "is under sidestep", restart=restart)


@service.command()
@click.argument("unit")
@click.option("--restart", is_flag=True, help="Restart the service, so that it is without sidestep at once.")
@_units_options
def disable(unit: str, restart: bool, user: bool, root: Path | None) -> None:
    """Remove the drop-in of UNIT. A unit without one is no error."""
    units = _units(user, root)
    full = f"{unit.removesuffix('.service')}.service"
    name = full if full in units.with_drop_in() else units.find(unit).name  # a service that has gone counts, too
    path = units.drop_in(name)
    if not path.exists():
        _say(f"{name} has no drop-in")
        return
    try:
        path.unlink()
        if not any(path.parent.iterdir()):
            path.parent.rmdir()
    except OSError as error:
        raise _refused(path, error) from error
    _say(f"{name}: removed {path}")
    _reread(units, name, "is without sidestep", restart=restart)


@service.command("list")
@_units_options
@json_option
def list_(user: bool, root: Path | None, as_json: bool) -> None:
    """List the services with a drop-in, and whether the library that it names is there."""
    units = _units(user, root)
    document = [_entry(units, name) for name in units.with_drop_in()]
    width = max((len(one["unit"]) for one in document), default=0)
    lines = [f"{one['unit']:<{width}}  {one['state']:<15}  {one['file']}" for one in document]
    show({"services": document}, lines, as_json=as_json)


def _entry(units: Units, name: str) -> dict[str, str]:
    path = units.drop_in(name)
    library = re.search(r'LD_PRELOAD=(?:.* )?(/.*?)"$', path.read_text(encoding="utf-8"), re.MULTILINE)
    here = library is not None and (units.root / library[1].replace("%%", "%").lstrip("/")).is_file()
    return {"unit": name, "file": str(path), "state": "enabled" if here else "library missing"}


def _reread(units: Units, name: str, becomes: str, *, restart: bool) -> None:
    """Lets systemd read the units again; with `restart` restarts the service."""
    if not units.running:
        _say("systemd does not run here; it reads the file when it starts")
        return
    _done(units, "daemon-reload")
    if restart:
        _done(units, "restart", name)
        _say(f"{name} was restarted and {becomes}")
    else:
        _say(f"{name} {becomes} once it is restarted: systemctl {'--user ' if units.user else ''}restart {name}")


def _done(units: Units, *words: str) -> None:
    found = units.systemctl(*words)
    if found.returncode:
        raise Unavailable(f"systemctl {' '.join(words)} failed: {found.stderr.strip()}",
                          remedy=f"systemctl status {words[-1]}" if words[1:] else "see the journal")  # fmt: skip


def _refused(path: Path, error: OSError) -> Unavailable:
    remedy = "use sudo, or --user for a service of your own" if isinstance(error, PermissionError) else "look at that"
    return Unavailable(f"{error.filename or path} cannot be changed: {error.strerror}", remedy=remedy)


def _say(text: str) -> None:
    click.echo(text, err=True)


@click.command()
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--at",
    "place",
    type=click.Path(path_type=PurePosixPath),
    default=str(bundles.PLACE),
    show_default=True,
    metavar="PATH",
    help="Place of the bundle in the other root; it works nowhere else.",
)
@json_option
def bundle(directory: Path, place: PurePosixPath, as_json: bool) -> None:
    """Write what starts static programs, those of Go and those of musl under sidestep in a root without glibc.

    DIRECTORY is new or empty. Mount it at the PATH of --at, or copy it there, for instance in a container of Alpine.
    With SIDESTEP_SOCKET set as for any container, 'PATH/run PROGRAM [ARG]...' is there what 'sidestep run' is here.
    """
    loader = loader_needed()
    libraries, missing = preload_check.libraries(loader)
    if missing:
        raise Unavailable(f"{', '.join(missing)} is not found, which {loader} needs", remedy="install it")
    files = bundles.write(directory, place, loader, libraries)
    size = sum(path.stat().st_size for path in files if not path.is_symlink())
    document = {"directory": str(directory), "at": str(place), "files": [path.name for path in files], "bytes": size}
    lines = [
        f"wrote {len(files)} files, {size} bytes, to {directory}; they work at {place}",
        f"hint: {place / bundles.ENTRY} PROGRAM [ARG]...",
    ]
    show(document, lines, as_json=as_json, talk=True)
