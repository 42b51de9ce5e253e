"""Debian packages for amd64 and arm64 from the wheels: `make deb`, where there is dpkg-deb.

The extension modules are of Python's stable ABI, so one package serves each CPython that Debian may have.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from email.utils import formatdate
from pathlib import Path

from wheels import DIST, GLIBC, MACHINES, ROOT, WORK

from sidestep import __version__

HERE = Path(__file__).parent / "debian"
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
MODULES = "usr/lib/python3/dist-packages"
DOC = "usr/share/doc/sidestep"
PROGRAM = """\
#!/usr/bin/python3
from sidestep.cli import main

main()
"""
CHANGES = """\
sidestep ({version}) unstable; urgency=medium

  * See CHANGELOG.md.

 -- The maintainers of sidestep <maintainers@sidestep.invalid>  {date}
"""
COMPLETIONS = {
    "bash": "usr/share/bash-completion/completions/sidestep",
    "fish": "usr/share/fish/vendor_completions.d/sidestep.fish",
    "zsh": "usr/share/zsh/vendor-completions/_sidestep",
}


def build(machine: str) -> Path:
    """A package for that machine."""
    root = WORK / f"deb-{machine}"
    shutil.rmtree(root, ignore_errors=True)
    for place in (MODULES, "usr/bin", "usr/lib/systemd/system", "usr/share/man/man1", "etc/sidestep", DOC, "DEBIAN"):
        (root / place).mkdir(parents=True)
    (wheel,) = DIST.glob(f"sidestep-{__version__}-*-manylinux*_{machine}.whl")
    unpack(wheel, root / MODULES)
    (root / "usr/bin/sidestep").write_text(PROGRAM)
    for unit in (ROOT / "systemd").iterdir():
        shutil.copy(unit, root / "usr/lib/systemd/system")
    shutil.copy(HERE / "policy.conf", root / "etc/sidestep")
    documents(root)
    from_commands(root)
    control(root, ARCHITECTURES[machine])
    for path in (root, *root.rglob("*")):
        program = path.parent.name == "bin" or (path.parent.name == "DEBIAN" and path.name.startswith("p"))
        path.chmod(0o755 if path.is_dir() or program else 0o644)
    package = DIST / f"sidestep_{__version__}_{ARCHITECTURES[machine]}.deb"
    subprocess.run(["dpkg-deb", "--build", "--root-owner-group", "-Zxz", root, package], check=True)
    return package


def unpack(wheel: Path, modules: Path) -> None:
    """The modules, and what pip would tell of them; its list of files would let it remove what is dpkg's."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(modules)
    shutil.rmtree(modules / f"sidestep-{__version__}.data")  # the units
    facts = modules / f"sidestep-{__version__}.dist-info"
    (facts / "RECORD").unlink()
    (facts / "INSTALLER").write_text("debian\n")


def documents(root: Path) -> None:
    for path in (HERE / "copyright", ROOT / "README.md", ROOT / "CHANGELOG.md"):
        shutil.copy(path, root / DOC)
    left_out = shutil.ignore_patterns("*.py", "mkdocs.yml", "__pycache__")
    shutil.copytree(ROOT / "docs", root / DOC / "docs", ignore=left_out)
    subprocess.run([sys.executable, ROOT / "docs/reference/make.py", root / DOC / "docs/reference"], check=True)
    date = formatdate(float(os.environ["SOURCE_DATE_EPOCH"]))
    compressed(root / DOC / "changelog", CHANGES.format(version=__version__, date=date))


def from_commands(root: Path) -> None:
    """Man pages and completion."""
    pages = root / "usr/share/man/man1"
    subprocess.run([sys.executable, ROOT / "docs/reference/make_man.py", pages], check=True)
    for page in list(pages.iterdir()):
        compressed(page, page.read_text())
        page.unlink()
    for shell, place in COMPLETIONS.items():
        env = os.environ | {"_SIDESTEP_COMPLETE": f"{shell}_source"}
        (root / place).parent.mkdir(parents=True)
        (root / place).write_text(
            subprocess.check_output([sys.executable, "-m", "sidestep"], env=env, text=True).lstrip()
        )


def compressed(path: Path, text: str) -> None:
    path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


def control(root: Path, architecture: str) -> None:
    files = [path for path in sorted(root.rglob("*")) if path.is_file()]
    size = sum(path.stat().st_size for path in files) // 1024
    about = (HERE / "control").read_text()
    about = about.format(version=__version__, architecture=architecture, glibc=GLIBC, size=size)
    sums = [f"{hashlib.md5(path.read_bytes()).hexdigest()}  {path.relative_to(root)}\n" for path in files]
    (root / "DEBIAN/control").write_text(about)
    (root / "DEBIAN/md5sums").write_text("".join(sums))
    (root / "DEBIAN/conffiles").write_text("/etc/sidestep/policy.conf\n")
    for script in ("postinst", "prerm", "postrm"):
        shutil.copy(HERE / script, root / "DEBIAN")


def main() -> None:
    if shutil.which("dpkg-deb") is None:
        sys.exit("packages are built by dpkg-deb, which Debian and its kin have: see `make wheels` for others")
    os.environ.setdefault("SOURCE_DATE_EPOCH", str(int((ROOT / "CHANGELOG.md").stat().st_mtime)))
    for machine in sys.argv[1:] or MACHINES:
        package = build(machine)
        print(package.relative_to(ROOT), package.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
