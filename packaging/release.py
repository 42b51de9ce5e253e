"""A release in dist/: checksums and notes of this version's wheels and Debian packages: `make release`.

The notes are this version's part of CHANGELOG.md, and the lines that install. A version that the changelog lacks is not
released.
"""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path
from typing import Final

from wheels import DIST, GLIBC, MACHINES, ROOT

from sidestep import __version__

CHANGELOG: Final = ROOT / "CHANGELOG.md"
SUMS: Final = "SHA256SUMS"
INSTALL: Final = """\
# sidestep {version}

```sh
sha256sum --check --ignore-missing {sums}
pip install {wheel}    # in a virtual environment
apt install ./{package}    # or this, as root, on Debian 12 or later
```

"""


def wheel_name(machine: str) -> str:
    """Name of the wheel that `make wheels` makes for that machine."""
    return f"sidestep-{__version__}-cp311-abi3-manylinux_{GLIBC.replace('.', '_')}_{machine}.whl"


def changes(text: str, version: str) -> str:
    """This version's part of a changelog, with links that hold nowhere else as plain text.

    Raises:
        ValueError: Another version stands first, or changes that belong to none.
    """
    newest = re.search(r"(?ms)^## (\S+)(?: - [\d-]+)?\n+(.*?)(?=^## |\Z)", text)
    if newest is None or newest[1] != version:
        raise ValueError(f"{newest[1] if newest else 'nothing'} stands first, not {version}")
    return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", newest[2])


def checksums(files: list[Path]) -> str:
    """The lines that `sha256sum --check` reads."""
    return "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files)


def main() -> None:
    try:
        notes = changes(CHANGELOG.read_text(), __version__)
    except ValueError as error:
        sys.exit(f"{CHANGELOG.name}: {error}: give the changes the version's heading")
    if sys.argv[1:] == ["--check"]:
        return
    wheels = [DIST / wheel_name(machine) for machine in MACHINES]
    packages = sorted(DIST.glob(f"sidestep_{__version__}_*.deb"))
    page = DIST / f"sidestep-{__version__}.md"
    install = INSTALL.format(
        version=__version__, sums=SUMS, wheel=wheels[0].name, package=f"sidestep_{__version__}_amd64.deb"
    )
    page.write_text(install + notes)
    (DIST / SUMS).write_text(checksums([*wheels, *packages, page]))
    for path in (*wheels, *packages, page, DIST / SUMS):
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
