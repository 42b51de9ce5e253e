"""What the tests on fresh systems share: the system is made once."""

from __future__ import annotations

from pathlib import Path

import pytest
from debian import bootstrap


@pytest.fixture(scope="session")
def debian(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of a Debian 12, which tests leave as it is."""
    place = tmp_path_factory.mktemp("fresh") / "debian"
    bootstrap(place)
    return place
