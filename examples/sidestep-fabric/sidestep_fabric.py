"""A transport in one page: the software RNIC, but only over the interfaces that FABRIC_INTERFACES names.

The switch finds `Fabric` by the entry point in pyproject.toml, and asks it for a device when a connection first wants
one: because `--remote-transports` or a rule of the policy names it.
"""

from __future__ import annotations

import os
from typing import ClassVar

from sidestep.gain import Profiles
from sidestep.loop import Loop
from sidestep.rdma.iwarp.device import IwarpDevice
from sidestep.routing import Address
from sidestep.switch.protocol import Capabilities, OffloadTransport, Request


class Fabric(OffloadTransport):
    """What the switch knows of us."""

    name: ClassVar[str] = "fabric"
    wire: ClassVar[str] = "iwarp"  # the other host may have any transport that speaks it
    # Whatever goes over it gains: by `--remote-promote gain` conversations leave TCP, too. The default is careful.
    profiles: ClassVar[Profiles] = Profiles(engine=None, python=None)
    # Not self_routing: each request comes with the kernel's route.
    capabilities: ClassVar[Capabilities] = Capabilities(rdma=True, local=False, remote=True)

    def refusal(self, request: Request) -> str | None:
        """Why a connection does not go over us; it must not wait."""
        named = os.environ.get("FABRIC_INTERFACES", "").split()
        assert request.route is not None
        if request.route.interface in named:
            return None
        return f"{request.route.interface} is none of FABRIC_INTERFACES ({' '.join(named) or 'empty'})"

    def open(self, local: Address, loop: Loop) -> IwarpDevice:
        """The device at an address of this host."""
        return IwarpDevice(str(local), loop, name=f"fabric@{local}")
