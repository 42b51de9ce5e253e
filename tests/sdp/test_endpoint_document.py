"""What docs/sdp-endpoint.md shows is run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs/sdp-endpoint.md"


@pytest.mark.parametrize("sample", re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL))
def test_sample(sample: str) -> None:
    exec(compile(sample, PAGE.name, "exec"), {})


def test_every_module_it_names_exists() -> None:
    for path in re.findall(r"`(sdp/\w+\.py)`", PAGE.read_text()):
        assert (PAGE.parents[1] / "src/sidestep" / path).exists(), path
