"""CPython's own socket tests have the same results under sidestep, with promotion at once, as without it."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
from suite import Exceptions, differences, run_module

from sidestep.testing import Sidestep

# Resources as of `python -m test -u`: "network" is all that test_socketserver, which stays on the host, asks for.
MODULES = {
    "test_socket": "",
    "test_asyncio": "",
    "test_ssl": "",
    "test_selectors": "",
    "test_select": "",
    "test_poll": "",
    "test_epoll": "",
    "test_socketserver": "network",
    "test_httplib": "",
}
# Those that make no TCP connection that lives for more than a call, so that there is nothing to promote.
WITHOUT_TCP = {"test_selectors", "test_select", "test_poll"}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("module", MODULES)
def test_same_results(module: str, tmp_path: Path) -> None:
    """Each test ends as it does natively, and connections were promoted."""
    if importlib.util.find_spec("test.test_socket") is None:
        why = "this Python came without its test package; run tests/setup"
        pytest.fail(why) if os.environ.get("CI") == "true" else pytest.skip(why)
    exceptions = Exceptions.load()
    excluded, resources = list(exceptions.excluded), MODULES[module]
    native = run_module(module, dict(os.environ), tmp_path / "native", resources, excluded)
    with Sidestep(promote_after="0") as sidestep:
        shimmed = run_module(module, sidestep.env(), tmp_path / "shimmed", resources, excluded)
        promoted = sidestep.status()
    assert len(native.outcomes) > 5
    assert not (found := differences(native, shimmed, exceptions)), "\n\n".join(found)
    print(promoted)
