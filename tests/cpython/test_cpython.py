"""CPython's own socket tests have the same results under sidestep, with promotion at once, as without it."""

from __future__ import annotations

import os
from collections.abc import Mapping

import needed
import pytest
from suite import Exceptions, Run, differences, run_module

from sidestep.testing import Sidestep

# Module -> connections that have to be promoted at least, or in BRIEF offered: those live for a call or two, and
# whether the other end claims them in that time is up to chance. Where it is 0, the module makes none of that kind.
MODULES = {
    "test_asyncio": 10,  # the longest: where several run at a time it is to begin first
    "test_selectors": 0,
    "test_select": 0,
    "test_poll": 0,
    "test_epoll": 0,
    "test_socket": 4,  # of some 80 that are offered; most live for a call or two, and 8 to 15 are claimed in that time
    "test_ssl": 30,
    "test_socketserver": 1,
    "test_httplib": 1,
    "test_subprocess": 0,  # children see no descriptor of ours, and get none of their parents' sockets
}
BRIEF = {"test_socketserver", "test_httplib"}
RESOURCES = {"test_socketserver": "network"}  # as of `python -m test -u`; these tests stay on the host all the same


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("module", MODULES)
def test_same_results(module: str) -> None:
    """Each test ends as it does natively, and connections were promoted.

    What is ok under sidestep is what TCP would show; only the rest is run natively as well.
    """
    needed.module("test.test_socket")
    exceptions = Exceptions.load()
    resources = RESOURCES.get(module, "")

    def run(env: Mapping[str, str], *left_out: str) -> Run:
        return run_module(f"test.{module}", env, resources=resources, excluded=[*exceptions.excluded, *left_out])

    with Sidestep(promote_after="0") as sidestep:
        shimmed = run(sidestep.env())
        counted = sidestep.status()["counters"].get("offer_accepted" if module in BRIEF else "claim_matched", 0)
    fine = {test: outcome for test, outcome in shimmed.outcomes.items() if outcome.verdict == "ok"}
    native = run(os.environ, *([] if shimmed.environment_altered else fine))
    native.outcomes = fine | native.outcomes
    assert len(shimmed.outcomes) > 5
    assert not (found := differences(native, shimmed, exceptions)), "\n\n".join(found)
    assert counted >= MODULES[module]
