"""The fixture `sidestep` for pytest, which finds this module by its entry point.

Each run of pytest where sidestep is installed imports it, so it imports nothing of sidestep before the fixture is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from sidestep.testing import Sidestep


@pytest.fixture
def sidestep() -> Iterator[Sidestep]:
    """A provider of its own for this test, and programs run under the shim with it: `sidestep.testing.Sidestep`."""
    from sidestep.testing import Sidestep

    with Sidestep() as private:
        yield private
