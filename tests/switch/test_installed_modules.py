"""Offload protocols and transports as distributions of their own, with a real provider."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest

from sidestep.errors import Unavailable
from sidestep.provider.control import ControlConnection
from sidestep.testing import Sidestep

CODE = '''
from sidestep.errors import Unavailable
from sidestep.switch.protocol import Capabilities, OffloadProtocol, OffloadTransport


class Wire(OffloadTransport):
    name = wire = "wire"
    capabilities = Capabilities(rdma=True, remote=True, self_routing=True)

    def open(self, local, loop):
        raise Unavailable("it has no device")


class Carrier(OffloadProtocol):
    """Can carry what a transport can."""

    name = "carrier"
    capabilities = Capabilities(self_routing=True)

    def refusal(self, request):
        try:
            self.services.transports.choose(request)
        except Unavailable as why:
            return why.message

    def join(self, pair):
        pair.attach()


class Broken(OffloadProtocol):
    name = "broken"
    capabilities = Capabilities()

    def start(self, services):
        raise OSError("no such device")

    def join(self, pair):
        pair.attach()
'''
POINTS = """
[sidestep.protocols]
broken = elsewhere:Broken
carrier = elsewhere:Carrier

[sidestep.transports]
wire = elsewhere:Wire
"""


def install(directory: Path) -> None:
    """What pip would leave there."""
    (directory / "elsewhere.py").write_text(textwrap.dedent(CODE))
    info = directory / "elsewhere-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: elsewhere\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(POINTS)


def states(connection: ControlConnection) -> dict[tuple[str, str], str]:
    return {(one["kind"], one["name"]): one["state"] for one in connection.document("modules")["modules"]}


def test_what_is_installed_while_the_provider_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    rules = tmp_path / "rules"
    rules.write_text("use carrier over wire connect * *:*\n")
    with Sidestep(policy=rules) as sidestep, ControlConnection(sidestep.socket) as connection:

        def asked() -> str:
            return str(connection.document("decide", role="connect", program="x", address="127.0.0.1", port=1)["why"])

        assert states(connection) == {
            ("protocol", "local"): "installed",
            ("protocol", "sdp"): "installed",
            ("transport", "iwarp"): "installed",
            ("transport", "roce"): "installed",
            ("transport", "verbs"): "installed",
        }
        assert "carrier is not installed" in asked()
        install(tmp_path)
        connection.document("module_add", name="carrier")
        assert "wire: it is not installed" in asked(), "transports are looked for when they are added, too"
        connection.document("module_add", name="wire", kind="transport")
        assert "carrier carries it" in asked()
        with pytest.raises(Unavailable, match="broken is refused: OSError: no such device"):
            connection.document("module_add", name="broken")
        assert states(connection) == {
            ("protocol", "broken"): "broken",
            ("protocol", "carrier"): "started",
            ("protocol", "local"): "installed",
            ("protocol", "sdp"): "installed",
            ("transport", "iwarp"): "installed",
            ("transport", "roce"): "installed",
            ("transport", "verbs"): "installed",
            ("transport", "wire"): "started",
        }
        connection.document("module_remove", name="wire", kind="transport")
        assert "wire: it was removed by 'sidestep provider remove'" in asked()
        with pytest.raises(Unavailable, match="unknown kind of module"):
            connection.document("module_add", name="wire", kind="wagon")
        assert json.dumps(sidestep.status()["counters"]).count("module_failed{broken}") == 1
