"""The package of `make deb` in a fresh Debian, from its installation to its purge: `make test-fresh`. Slow."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
from pathlib import Path

import pytest
from fresh_debian import fresh_debian, run_booted, run_in

from sidestep import __version__

ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]
PACKAGE = Path(__file__).parents[2] / f"dist/sidestep_{__version__}_{ARCHITECTURE}.deb"
NEXT = f"{__version__}+1"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

INSTALLED = """
if command -v cc gcc clang pip; then exit 1; fi
apt-get install -y --no-install-recommends /packages/this.deb >&2
for page in /usr/share/man/man1/sidestep*; do
    sidestep $(basename $page .1.gz | cut -d- -f2- -s | tr - ' ') --help >/dev/null
done
test -f /etc/systemd/system/sockets.target.wants/sidestep.socket
sidestep policy check >&2
bash -c '
    source /usr/share/bash-completion/completions/sidestep
    COMP_WORDS=(sidestep ss --sta); COMP_CWORD=2; _sidestep_completion sidestep; echo "${COMPREPLY[@]}"'
sidestep metrics 2>&1 || test $? = 2
sidestep capture -w /dev/null 2>&1 || test $? = 2
"""
IN_USE = f"""
cd /tmp
sidestep run --promote-after 0 -- redis-server --port 7001 --save '' >/dev/null &
until redis-cli -p 7001 ping >/dev/null 2>&1; do sleep 0.1; done
sidestep run --promote-after 0 -- redis-cli -p 7001 -r -1 ping >/dev/null & load=$!
until test "$(sidestep ss --state promoted --json | grep -c '"pid"')" = 2; do sleep 0.1; done
echo '# said by the administrator' >> /etc/sidestep/policy.conf
sidestep ss --json | tr -d '\\n'; echo
dpkg --install /packages/next.deb >&2
dpkg-query --show --showformat '${{Version}}\\n' sidestep | grep -Fx '{NEXT}' >&2
tail -1 /etc/sidestep/policy.conf | grep administrator >&2
sidestep ss --json | tr -d '\\n'; echo
test "$(sidestep run -- redis-cli -p 7001 ping)" = PONG
dpkg --remove sidestep >&2
if ls -d /usr/bin/sidestep || ls -d /usr/lib/python3/dist-packages/sidestep*; then exit 1; fi
grep -q administrator /etc/sidestep/policy.conf
kill -0 $load
test "$(redis-cli -p 7001 ping)" = PONG
dpkg --purge sidestep >&2
find /etc /usr /var -name '*sidestep*' -not -path '/var/log/*'
"""
SERVED = """
apt-get install -y --no-install-recommends /packages/this.deb >&2
systemctl is-active sidestep.socket
systemctl is-active sidestep.service || test $? = 3
sidestep run -- sh -c 'sidestep provider status' | grep -o '/run/sidestep/provider$'
before=$(systemctl show --property MainPID --value sidestep.service)
dpkg --install /packages/next.deb >&2
systemctl is-active sidestep.service
test $before != $(systemctl show --property MainPID --value sidestep.service)
systemctl disable --now sidestep.socket sidestep.service
dpkg --install /packages/this.deb >&2
systemctl is-enabled sidestep.socket || test $? = 1
systemctl enable --now sidestep.socket
dpkg --remove sidestep >&2
systemctl is-active sidestep.socket || true
dpkg --purge sidestep >&2
find /etc /usr -name '*sidestep*'
"""


@pytest.fixture(scope="module", params=["bookworm", "trixie"])
def debian(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the package, and one like it of a later version, in /packages."""
    root = tmp_path_factory.mktemp("debian")
    fresh_debian(root, request.param, "python3-click", "redis-server", "systemd")
    (packages := root / "packages").mkdir()
    (packages / "this.deb").write_bytes(PACKAGE.read_bytes())
    changed = root / "tmp/next"
    subprocess.run(["dpkg-deb", "--raw-extract", PACKAGE, changed], check=True)
    control = changed / "DEBIAN/control"
    control.write_text(control.read_text().replace(f"Version: {__version__}", f"Version: {NEXT}"))
    subprocess.run(["dpkg-deb", "--build", "--root-owner-group", changed, packages / "next.deb"], check=True)
    return root


def test_the_package_is_installed_used_upgraded_removed_and_purged(debian: Path) -> None:
    assert run_in(debian, INSTALLED).splitlines() == [
        "--state",
        "sidestep: prometheus_client is not installed for /usr/bin/python3",
        "hint: apt install python3-prometheus-client",
        "sidestep: pcapng is not installed for /usr/bin/python3",
        "hint: install sidestep's wheel in a virtual environment, and there: pip install 'python-pcapng>=2.1.1,<3'",
    ]
    before, after = map(json.loads, run_in(debian, IN_USE).splitlines())  # and nothing is left behind
    assert [one["state"] for one in after["connections"]] == ["promoted"] * 2
    assert [one["segment"] for one in after["connections"]] == [one["segment"] for one in before["connections"]]


def test_the_service_manager_has_the_socket_at_once_and_the_new_provider_after_an_upgrade(debian: Path) -> None:
    """And what an administrator has disabled stays so."""
    assert run_booted(debian, SERVED).split() == [
        "active", "inactive", "/run/sidestep/provider", "active", "disabled", "inactive",
    ]  # fmt: skip


@pytest.mark.skipif(not shutil.which("lintian"), reason="the package's checker is missing; apt-get install lintian")
def test_lintian_finds_no_error() -> None:
    subprocess.run(["lintian", "--fail-on", "error", PACKAGE], check=True)
