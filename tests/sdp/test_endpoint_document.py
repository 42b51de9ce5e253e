"""docs/internals/sdp.md names modules and limits that exist."""

from __future__ import annotations

import re
from pathlib import Path

import sidestep.sdp
from sidestep import limits

DOCUMENT = (Path(sidestep.sdp.__file__).parents[3] / "docs/internals/sdp.md").read_text()


def test_limits_that_are_named_exist() -> None:
    named = set(re.findall(r"`(SDP_[A-Z_]+)`", DOCUMENT))
    assert named
    assert all(hasattr(limits, name) for name in named)


def test_every_module_that_is_named_exists() -> None:
    named = re.findall(r"`((?:sdp|api)/\w+\.py)`", DOCUMENT)
    assert len(named) > 10
    assert [path for path in named if not (Path(sidestep.sdp.__file__).parents[1] / path).exists()] == []
