"""`sidestep bundle`: what programs need to come under sidestep in a root without glibc."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import click

from sidestep import bundle as bundles
from sidestep.cli.options import json_option
from sidestep.cli.shown import show
from sidestep.errors import Unavailable
from sidestep.installation import loader_needed
from sidestep.observe import preload_check


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
