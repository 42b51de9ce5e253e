"""``python -m sidestep.provider``: what `sidestep provider start` and `sidestep run` start."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from sidestep import gain, limits
from sidestep.errors import SidestepError
from sidestep.provider.daemon import serve
from sidestep.settings import PolicyPlace, PromoteAfter, Proof, ProviderSettings, RemoteSettings, parse_cpus


def main() -> int:
    """Serves as the arguments say; 0 after an orderly end, 1 if it could not start."""
    parser = argparse.ArgumentParser(prog="python -m sidestep.provider", description="Serve as a sidestep provider.")
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--promote-after", type=PromoteAfter.parse, required=True)
    parser.add_argument("--ring-size", type=int, required=True)
    parser.add_argument("--offer-expiry", type=float, required=True)
    parser.add_argument("--idle-exit", type=float, required=True)
    parser.add_argument("--budget", type=int, required=True)
    parser.add_argument("--policy", type=PolicyPlace.parse, action="append", default=[])
    parser.add_argument("--proof", type=Proof, required=True)
    parser.add_argument("--system", action="store_true")
    parser.add_argument("--remote")
    parser.add_argument("--remote-key")
    parser.add_argument("--engine", choices=("on", "off"), default="on")
    parser.add_argument("--remote-promote", default=gain.ALWAYS)
    parser.add_argument("--remote-transports", default="")
    parser.add_argument("--remote-pinned", type=int, default=limits.REMOTE_PINNED_BYTES)
    parser.add_argument("--remote-connections", type=int, default=limits.RELAYS_MAX)
    parser.add_argument("--engine-cpu", type=parse_cpus, default=())
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--background", action="store_true")
    parser.add_argument("--ready-fd", type=int)
    given = parser.parse_args()
    settings = ProviderSettings(
        socket=given.socket,
        promote_after=given.promote_after,
        ring_size=given.ring_size,
        offer_expiry_s=given.offer_expiry,
        idle_exit_s=given.idle_exit,
        budget_bytes=given.budget,
        policy=tuple(given.policy),
        system=given.system,
        proof=given.proof,
        remote=(
            RemoteSettings.parse(
                given.remote,
                given.remote_key,
                engine=given.engine == "on",
                engine_cpus=given.engine_cpu,
                promote=given.remote_promote,
                transports=given.remote_transports,
                pinned_max=given.remote_pinned,
                connections_max=given.remote_connections,
            )
            if given.remote
            else None
        ),
        workers=given.workers,
    )
    try:
        serve(settings, ready_fd=given.ready_fd, background=given.background)
    except SidestepError as error:
        print(f"sidestep provider: {error}", file=sys.stderr)  # noqa: T201 - a command's error message
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
