"""Builds the documentation site, as `make docs` does; `--stage DIRECTORY` only lays the pages out.

The pages lie in the site as they lie in the repository, so that links between them hold. The menu is docs/index.md.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import yaml
from make import PAGES

ROOT: Final = Path(__file__).parents[2]
BUILD: Final = ROOT / "build"
PROJECT: Final = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "tests/interop/README.md")
_LINK: Final = re.compile(r"\[([^\]]*)\]\(([^)#:\s]+)(#[^)\s]+)?\)")


def stage(place: Path) -> None:
    """Lays out kept pages, made pages, and the files that they link to."""
    kept = [*PROJECT, *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md")))]
    for name in kept:
        copied(ROOT / name, place)
    subprocess.run([sys.executable, Path(__file__).parent / "make.py", place / "docs/reference"], check=True)
    index = place / "docs/reference/index.md"
    index.write_text(re.sub(r"(?m)^\| `(\w+\.md)` \|", r"| [\1](\1) |", index.read_text()))
    for page in sorted(place.rglob("*.md")):
        text = page.read_text()
        for label, target, anchor in _LINK.findall(text):
            source = ROOT / page.parent.relative_to(place) / target
            if source.is_dir():  # a folder has no page
                text = text.replace(f"[{label}]({target}{anchor})", label)
            elif source.is_file() and source.suffix != ".md":
                copied(source.resolve(), place)
        page.write_text(text)


def copied(path: Path, place: Path) -> None:
    """Puts a file of the repository where it lies there."""
    there = place / path.relative_to(ROOT)
    there.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(path, there)


def menu() -> list[dict[str, object]]:
    """The sections of docs/index.md, with the pages that each links to; the pages made from code stand in Reference."""
    sections: list[dict[str, object]] = [{"Overview": ["README.md", "docs/index.md"]}]
    for title, body in re.findall(r"(?ms)^## (.*?)\n(.*?)(?=^## |\Z)", (ROOT / "docs/index.md").read_text()):
        targets = [target for _, target, _ in _LINK.findall(body)]
        pages = [f"docs/{target}" for target in targets if target.endswith(".md") and "../" not in target]
        if title == "Reference":
            pages += [f"docs/reference/{name}" for name in PAGES]
        sections.append({title: list(dict.fromkeys(pages))})
    return [*sections, {"Project": [*PROJECT[1:]]}]


def main() -> int:
    """Builds the site in build/site; returns 1 if a link leads nowhere."""
    if sys.argv[1:2] == ["--stage"]:
        stage(Path(sys.argv[2]))
        return 0
    shutil.rmtree(BUILD / "docs", ignore_errors=True)
    stage(BUILD / "docs")
    config = {"INHERIT": "../docs/mkdocs.yml", "docs_dir": "docs", "site_dir": "site", "nav": menu()}
    (BUILD / "mkdocs.yml").write_text(yaml.safe_dump(config, sort_keys=False))
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(BUILD / "mkdocs.yml")]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}  # an advertisement for its successor
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:  # with --quiet it would not count warnings
        print(done.stderr, file=sys.stderr)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
