"""What the tests on fresh systems share: the system is made once."""

from __future__ import annotations

from pathlib import Path

import pytest
from fresh_debian import fresh_debian

PACKAGES = ("python3", "python3-venv", "redis-server", "systemd-sysv", "dbus")


@pytest.fixture(scope="session")
def debian(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of a Debian 12, which tests leave as it is."""
    place = tmp_path_factory.mktemp("fresh") / "debian"
    fresh_debian(place, "bookworm", *PACKAGES)
    return place
