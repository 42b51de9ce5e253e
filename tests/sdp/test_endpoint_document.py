"""The examples of docs/internals/sdp-endpoint.md run, and what it names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import sidestep.sdp
from sidestep import limits

DOCUMENT = (Path(sidestep.sdp.__file__).parents[3] / "docs/internals/sdp-endpoint.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_the_examples_run(number: int) -> None:
    exec(compile(EXAMPLES[number], f"example {number}", "exec"), {"__name__": "example"})


def test_there_are_examples_of_sockets_and_streams() -> None:
    assert ["SdpSocket" in each for each in EXAMPLES] == [True, False]
    assert ["asyncio" in each for each in EXAMPLES] == [False, True]


def test_limits_that_are_named_exist() -> None:
    named = set(re.findall(r"`(SDP_[A-Z_]+)`", DOCUMENT))
    assert named
    assert all(hasattr(limits, name) for name in named)


def test_every_module_that_is_named_exists() -> None:
    named = re.findall(r"`((?:sdp|api)/\w+\.py)`", DOCUMENT)
    assert named
    assert [path for path in named if not (Path(sidestep.sdp.__file__).parents[1] / path).exists()] == []
