"""Programs in containers of podman, and services of a systemd that runs in one: `make test-fresh`, as root.

Images are made here, of a fresh Debian and the wheel; nothing is pulled. Each container has namespaces of its own for
network, processes and users, a root that cannot be written, no capabilities, and podman's own seccomp profile.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
import yaml
from built import ROOT, with_all_it_needs

CONFINED = ["--read-only", "--cap-drop=all", "--security-opt=no-new-privileges"]
USERS = ["--uidmap=0:100000:65536", "--gidmap=0:100000:65536"]
OTHER_USERS = ["--uidmap=0:200000:65536", "--gidmap=0:200000:65536"]
WAIT_S = 60
FoundT = TypeVar("FoundT")
LIMITS = ["nofile=4096:4096", "nproc=4096:4096"]
# Writes and reads back values that only it knows.
ROUNDS, SIZE = 500, 20_000
_EXCHANGE = (
    f"ROUNDS, SIZE = {ROUNDS}, {SIZE}"
    + r"""
import os, select, signal, socket, sys
sock = socket.create_connection((sys.argv[1], 6379))
file = sock.makefile("rb")
def exchange():
    value = os.urandom(SIZE)
    sock.sendall(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$%d\r\n%b\r\n" % (len(value), value))
    assert file.readline() == b"+OK\r\n"
    sock.sendall(b"*2\r\n$3\r\nGET\r\n$1\r\nk\r\n")
    assert file.readline() == b"$%d\r\n" % len(value)
    assert file.read(len(value) + 2)[:-2] == value
"""
)
# The one until it is told to end, the other for so many; then says that all were equal.
CLIENT = f"{_EXCHANGE}\nwhile not select.select([sys.stdin], [], [], 0)[0]: exchange()\nprint('equal')"
COUNTED = f"{_EXCHANGE}\nfor _ in range(ROUNDS): exchange()\nprint('equal', flush=True)\nsignal.pause()"
SERVER = ["redis-server", "--save", "", "--protected-mode", "no"]
OURS = {"LD_PRELOAD": "/opt/sidestep/libsidestep.so", "SIDESTEP_SOCKET": "/run/sidestep/provider"}
PROGRAM = "FROM localhost/debian\nCOPY --from=localhost/sidestep /opt/sidestep/libsidestep.so /opt/sidestep/\n"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class Podman:
    """Podman with images, containers and a network of its own."""

    network = "sidestep-test"

    def __init__(self, place: Path) -> None:
        networks = f'[network]\nnetwork_backend="netavark"\nnetwork_config_dir="{place}/networks"\n'
        # crun does not start where version 1 of cgroups is used beside version 2.
        runtime = 'runtime="runc"\n' if shutil.which("runc") else ""
        engine = f'[engine]\ncgroup_manager="cgroupfs"\n{runtime}{networks}'
        # Podman's own limits are some that not every root may set.
        containers = f"[containers]\ndefault_ulimits={LIMITS}\n"
        (place / "containers.conf").write_text(containers + engine)
        self._host_pid = place / "host-pid.conf"
        self._host_pid.write_text(f'{containers}pidns="host"\n{engine}')
        self._env = os.environ | {"CONTAINERS_CONF": str(place / "containers.conf")}
        self._argv = ["podman", f"--root={place}/root", f"--runroot={place}/run"]

    def __call__(self, *words: str | Path, check: bool = True, host_pid: bool = False, **options: Any) -> str:
        env = self._env | ({"CONTAINERS_CONF": str(self._host_pid)} if host_pid else {})
        found: subprocess.CompletedProcess[str] = subprocess.run(
            [*self._argv, *words], env=env, capture_output=True, text=True, **options
        )
        assert not check or found.returncode == 0, f"podman {words}: {found.stderr}"
        return found.stdout.strip() if check else found.stderr.strip()

    def popen(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*self._argv, *words], env=self._env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def run(self, *words: str) -> list[str]:
        """The words that run a container."""
        return ["run", "--rm", *words]

    def address(self, name: str) -> str:
        return self("inspect", "-f", f'{{{{(index .NetworkSettings.Networks "{self.network}").IPAddress}}}}', name)

    def container_id(self, name: str) -> str:
        return self("inspect", "-f", "{{.Id}}", name)[:12]

    def add_image(self, name: str, containerfile: str | Path, context: Path, *words: str) -> None:
        text = containerfile if isinstance(containerfile, str) else containerfile.read_text()
        (context / "Containerfile").write_text(text)
        self("build", "--isolation=chroot", *words, f"--tag=localhost/{name}", context)

    def clear(self) -> None:
        """Without what other tests have left."""
        self("pod", "rm", "--all", "--force", "--time=0", check=False)
        self("rm", "--all", "--force", "--time=0", check=False)
        self("volume", "prune", "--force", check=False)

    def end(self) -> None:
        self.clear()
        self("network", "rm", "--force", self.network, check=False)
        self("rmi", "--all", "--force", check=False)


@pytest.fixture(scope="module")
def podman(tmp_path_factory: pytest.TempPathFactory, debian: Path) -> Iterator[Podman]:
    """With images of Debian, of sidestep as examples/Containerfile makes it, and of Debian with the library."""
    if os.getuid() != 0 or shutil.which("podman") is None:
        pytest.skip("podman makes the containers, as root; apt-get install podman runc netavark iptables")
    made = Podman(tmp_path_factory.mktemp("podman"))
    try:
        with subprocess.Popen(["tar", "-C", debian, "-c", "."], stdout=subprocess.PIPE) as tar:
            made("import", "-", "localhost/debian", stdin=tar.stdout)
        made("network", "create", made.network)
        try:
            made(*made.run("--network", made.network, *USERS, "localhost/debian", "true"))
        except AssertionError as error:  # of a container that does nothing: the host's sandbox forbids all of them
            pytest.skip(f"containers cannot be made here: {error}")
        with_all_it_needs(platform.machine(), dist := tmp_path_factory.mktemp("dist"))
        base = ["--env=PIP_NO_INDEX=1", "--build-arg=BASE=localhost/debian"]
        made.add_image("sidestep", ROOT / "examples/Containerfile", dist, *base)
        made.add_image("program", PROGRAM, tmp_path_factory.mktemp("program"))
        yield made
    finally:
        made.end()


@pytest.fixture
def provider() -> Iterator[Path]:
    """The directory of a system-wide provider on the host: what containers mount at /run/sidestep."""
    with tempfile.TemporaryDirectory(prefix="sidestep-containers-", dir="/run") as name:
        (place := Path(name)).chmod(0o755)
        argv = [sys.executable, "-m", "sidestep", "provider", "start", "--system", "--foreground", "--socket"]
        with subprocess.Popen([*argv, place / "provider"], stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            assert "serves" in process.stderr.readline()
            yield place
            process.terminate()


def shown(place: Path) -> str:
    """What `sidestep ss` of the host shows."""
    argv = [sys.executable, "-m", "sidestep", "ss", "--json", "--socket", str(place / "provider")]
    return subprocess.check_output(argv, text=True)


def until(look: Callable[[], str], wanted: set[tuple[str, str]]) -> list[dict[str, Any]]:
    """What is shown once these programs, and no others, have connections in these states."""

    def connections() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(look())["connections"]
        return found

    return eventually(connections, lambda found: {(one["program"], one["state"]) for one in found} == wanted)


def eventually(look: Callable[[], FoundT], holds: Callable[[FoundT], bool]) -> FoundT:
    """What is found once it is so."""
    deadline = time.monotonic() + WAIT_S
    while not holds(found := look()):
        assert time.monotonic() < deadline, found
        time.sleep(0.1)  # nothing tells of a change: between two looks
    return found


def program(podman: Podman, place: Path, name: str, users: list[str], *words: str) -> list[str]:
    """The words that run a program in a container under sidestep."""
    ours = [f"--env={name}={value}" for name, value in OURS.items()]
    mounted = f"--volume={place}:/run/sidestep:ro"
    where = ["--name", name, "--network", podman.network, *users, *CONFINED]
    return podman.run(*where, *ours, mounted, "-i", "localhost/program", *words)


@pytest.fixture
def server(podman: Podman, provider: Path) -> Iterator[str]:
    """The address of a redis."""
    argv = program(podman, provider, "server", USERS, *SERVER)
    with podman.popen(*argv) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "Ready to accept" in line:
                break
        yield podman.address("server")
        podman("kill", "server", check=False)


@pytest.mark.parametrize(("users", "state"), [(USERS, "promoted"), (OTHER_USERS, "native")], ids=["one", "two"])
def test_two_containers_meet_by_one_directory_if_they_are_one_users(
    podman: Podman, provider: Path, server: str, users: list[str], state: str
) -> None:
    with podman.popen(*program(podman, provider, "client", users, "python3", "-c", CLIENT, server)) as client:
        listed = until(partial(shown, provider), {("python3", state), ("redis-server", state)})
        found = {one["program"]: one for one in listed}
        assert found["python3"]["container"] == podman.container_id("client")
        assert found["redis-server"]["container"] == podman.container_id("server")
        if state == "native":
            assert "another user" in found["python3"]["why"]
        assert client.communicate("end\n")[0] == "equal\n"


# ---- examples/compose.yaml ----


def composed(podman: Podman, name: str, service: dict[str, Any]) -> list[str]:
    """What a compose program would run for a service; a program's container gets users of its own."""
    words = ["--name", name, "--network", service.get("network_mode", podman.network)]
    words += [f"--pid={service['pid']}"] if "pid" in service else []
    words += [] if "userns_mode" in service or name == "library" else USERS
    words += [f"--user={service['user']}"] if "user" in service else []
    words += ["--read-only"] if service.get("read_only") else []
    words += [f"--cap-drop={one}" for one in service.get("cap_drop", ())]
    words += [f"--security-opt={one}" for one in service.get("security_opt", ())]
    words += [f"--env={key}={value}" for key, value in service.get("environment", {}).items()]
    words += [f"--volume={one}" for one in service["volumes"]]
    return podman.run(*words, service["image"].replace("docker.io/library/redis:7-bookworm", "localhost/debian"))


def test_the_compose_example_is_promoted(podman: Podman) -> None:
    services = yaml.safe_load((ROOT / "examples/compose.yaml").read_text())["services"]
    started = {name: composed(podman, name, service) for name, service in services.items()}
    podman(*started["library"], *services["library"]["command"])
    for name in ("provider", "redis"):
        words = started[name]
        podman(words[0], "--detach", *words[1:], *services[name].get("command", ()))
    command = [podman.address("redis") if word == "redis" else word for word in services["client"]["command"]]
    with podman.popen(*started["client"], *command):
        look = partial(podman, "exec", "--user=0", "provider", "sidestep", "ss", "--json")
        found = until(look, {("redis-server", "promoted"), ("redis-benchmark", "promoted")})
        assert {one["container"] for one in found} == {podman.container_id(name) for name in ("redis", "client")}
        podman("kill", "client", "redis", "provider")


# ---- examples/kubernetes.yaml ----

REDIS = "docker.io/library/redis:7-bookworm"
# Podman removes an init container of the other kind once it has ended, and may find that it runs still.
STAYS = "--annotation=io.podman.annotations.init.container.type=always"


def pods_of_the_example(run: Path) -> dict[str, dict[str, Any]]:
    """Its pods, also the one that a DaemonSet makes, with another directory of the host in place of /run/sidestep."""
    text = (ROOT / "examples/kubernetes.yaml").read_text().replace("path: /run/sidestep,", f"path: {run},")
    found = {}
    for one in yaml.safe_load_all(text):
        if one["kind"] == "DaemonSet":
            one = {"apiVersion": "v1", "kind": "Pod", "spec": one["spec"]["template"]["spec"]} | {
                "metadata": {"name": one["metadata"]["name"]} | one["spec"]["template"]["metadata"]
            }
        if one["kind"] == "Pod":
            found[one["metadata"]["name"]] = one
            one["metadata"]["name"] = f"pod-{one['metadata']['name']}"
    return found


def played(podman: Podman, pod: dict[str, Any]) -> str:
    """The name of its container. What podman 4.3 does not take is said in another way: hostPID."""
    own_network = [] if pod["spec"].get("hostNetwork") else [f"--network={podman.network}"]
    host_pid = pod["spec"].get("hostPID", False)
    podman("kube", "play", STAYS, *own_network, "-", input=yaml.safe_dump(pod), host_pid=host_pid)
    return f"{pod['metadata']['name']}-{pod['spec']['containers'][0]['name']}"


def until_logged(podman: Podman, name: str, text: str) -> None:
    eventually(lambda: podman("logs", name), lambda said: text in said)


def test_the_kubernetes_example_is_promoted(podman: Podman, tmp_path: Path) -> None:
    podman.clear()  # an emptyDir gets the name of a volume of compose
    podman.add_image("path", f"FROM localhost/debian\nENV PATH={os.defpath}\n", tmp_path, f"--tag={REDIS}")
    with tempfile.TemporaryDirectory(prefix="sidestep-pods-", dir="/run") as name:
        (place := Path(name)).chmod(0o755)
        pods = pods_of_the_example(place / "made-by-podman")
        provider, redis = played(podman, pods["sidestep"]), played(podman, pods["redis"])
        until_logged(podman, redis, "Ready to accept")
        address = podman.address(podman("pod", "inspect", "-f", "{{.InfraContainerID}}", "pod-redis"))
        (program,) = pods["client"]["spec"]["containers"]
        program["command"] = [address if word == "redis" else word for word in program["command"]]
        client = played(podman, pods["client"])
        look = partial(podman, "exec", "--user=0", provider, "sidestep", "ss", "--json")
        found = until(look, {("redis-server", "promoted"), ("redis-benchmark", "promoted")})
        assert {one["container"] for one in found} == {podman.container_id(name) for name in (redis, client)}
        podman("pod", "rm", "--force", "--time=0", "pod-client")

        program["command"] = ["python3", "-c", COUNTED, address]
        until_logged(podman, played(podman, pods["client"]), "equal")
        found = until(look, {("redis-server", "promoted"), ("python3", "promoted")})
        (one,) = (one for one in found if one["program"] == "python3")
        assert min(one["tx"]["ring_bytes"], one["rx"]["ring_bytes"]) > ROUNDS * SIZE * 0.9
        podman("pod", "rm", "--all", "--force", "--time=0")


# ---- services of systemd ----

IN_SYSTEMD = r"""
set -e
python3 -m venv /opt/sidestep
/opt/sidestep/bin/pip install --quiet --no-index --find-links /wheels sidestep
PATH=/opt/sidestep/bin:$PATH
ln -s /opt/sidestep/bin/sidestep /usr/local/bin/
systemctl daemon-reload
systemctl start sidestep.socket
promoted() {  # redis-server at a port
    sidestep run -- redis-benchmark -p $1 -t ping -n 1000000000 >/dev/null 2>&1 &
    until sidestep ss --program redis-server --port $1 --state promoted | grep -q redis-server; do sleep 0.1; done
    kill $!
}
sidestep service enable redis --restart
test /etc/systemd/system/redis-server.service.d/sidestep.conf = \
    "$(sidestep service list | sed 's/.* //')"
promoted 6379
sidestep service disable redis-server --restart
test -z "$(sidestep service list)"
test ! -e /etc/systemd/system/redis-server.service.d
! tr '\0' '\n' </proc/$(systemctl show --property MainPID --value redis-server)/environ | grep LD_PRELOAD

# One by one what would keep the shim out.
mkdir /srv/root
port=7000
while read -r sandbox; do
    port=$((port + 1))
    printf '[Service]\nType=exec\nExecStart=/usr/bin/redis-server --port %s\n%b\n' $port "$sandbox" \
        >/run/systemd/system/sandbox.service
    sidestep service enable sandbox --restart
    promoted $port
    echo "promoted with $sandbox"
    sidestep service disable sandbox
done <<END
NoExecPaths=/\nExecPaths=/usr /lib
RestrictAddressFamilies=AF_INET AF_INET6
RestrictAddressFamilies=~AF_UNIX
SystemCallFilter=~@resources @ipc connect eventfd2
TemporaryFileSystem=/opt /run
RootDirectory=/srv/root\nBindReadOnlyPaths=/usr /lib /lib64 /etc
MemoryDenyWriteExecute=yes\nPrivateTmp=yes\nPrivateUsers=yes\nProtectHome=yes\nProtectSystem=strict
END
systemctl stop sandbox
"""
SANDBOXES = 7


def test_services_come_under_sidestep_in_spite_of_their_sandbox_and_leave_it(podman: Podman, tmp_path: Path) -> None:
    """Debian's redis, whose unit has almost every sandboxing there is; then what keeps the shim out, one by one."""
    with_all_it_needs(platform.machine(), tmp_path / "wheels")
    mounts = [f"--volume={tmp_path}/wheels:/wheels:ro"]
    mounts += [f"--volume={path}:/etc/systemd/system/{path.name}:ro" for path in (ROOT / "systemd").iterdir()]
    groups = [] if Path("/sys/fs/cgroup/cgroup.controllers").exists() else ["--cgroupns=host"]
    inside = ["--systemd=always", "--privileged", *groups, f"--network={podman.network}", *mounts]
    podman(*podman.run("--detach", "--name=system", *inside, "localhost/debian", "/sbin/init"))
    booted = podman("exec", "system", "sh", "-c", "until test -S /run/dbus/system_bus_socket; do sleep 0.1; done;"
                    "systemctl is-system-running --wait", check=False, timeout=WAIT_S)  # fmt: skip
    found = podman("exec", "system", "sh", "-c", IN_SYSTEMD, timeout=4 * WAIT_S)
    assert found.count("promoted with ") == SANDBOXES, booted
    podman("kill", "system")
