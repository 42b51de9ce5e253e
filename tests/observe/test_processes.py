"""Programs in pid namespaces of their own are shown by the numbers that whoever looks can use."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from chatting import PROGRAM, Chat, talk_on
from common import eventually

from sidestep.observe.processes import Processes, container_of, program_name, service_of
from sidestep.testing import Sidestep

ID = "4fa6e0f0c6786287e131c3852c58a2e01cc697a68231826813597e4994f1d6e2"
# Root without a capability, as in a provider's container, may not read what namespaces others have.
POWERLESS = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]


@pytest.mark.slow
def test_a_program_in_a_container_has_the_number_it_has_here(sidestep: Sidestep, closing: ExitStack) -> None:
    contained = ["unshare", *([] if os.geteuid() == 0 else ["--user", "--map-current-user"]), "--pid", "--fork"]
    if subprocess.run([*contained, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody make pid namespaces")
    chat = Chat(closing, sidestep.popen)
    client = chat.client(sidestep.popen, argv=[*contained, "--kill-child", sys.executable, str(PROGRAM)])

    def promoted() -> bool:
        talk_on(client)
        return sum(one.promoted for one in sidestep.connections()) == 2

    eventually(promoted)
    (inside,) = _children(client.pid)
    (found,) = (one for one in sidestep.connections() if one.pid != chat.server.pid)
    assert (found.pid, found.program) == (inside, program_name(inside))
    listed = [sys.executable, "-m", "sidestep", "ss", f"--socket={sidestep.socket}", f"--pid={inside}"]
    assert f" {inside} " in subprocess.run(listed, capture_output=True, text=True, check=True, timeout=60).stdout
    if os.geteuid() == 0:
        powerless = subprocess.run([*POWERLESS, *listed], capture_output=True, text=True, check=True, timeout=60)
        assert f" {inside} " in powerless.stdout
    from_there = [*contained, "--mount-proc", *listed[:-1]]  # another container, which sees neither program
    looked = subprocess.run(from_there, capture_output=True, text=True, check=True, timeout=60)
    shown = [line.split()[:5] for line in looked.stdout.splitlines()[1:]]
    assert shown == [["(not", "seen", "from", "here)", "-"]] * 2


def test_a_namespace_that_nobody_is_in() -> None:
    assert Processes().here(namespace=1, pid=1) == 0
    assert Processes().here(namespace=0, pid=7) == 7
    assert program_name(0) is None


@pytest.mark.parametrize(
    ("cgroup", "container"),
    [
        ("0::/\n", None),
        ("0::/user.slice/user-1000.slice/session-3.scope\n", None),
        (f"0::/system.slice/docker-{ID}.scope\n", ID[:12]),
        (f"12:pids:/docker/{ID}\n0::/\n", ID[:12]),
        (f"0::/kubepods.slice/kubepods-pod12.slice/cri-containerd-{ID}.scope\n", ID[:12]),
        (f"0::/kubepods/besteffort/pod1234/{ID}\n", ID[:12]),
        (f"0::/machine.slice/libpod-{ID}.scope/container\n", ID[:12]),
        (f"9:pids:/libpod_parent/{ID[::-1]}/libpod-{ID}\n", ID[:12]),  # a pod's; the first is that of the pod
        (f"0::/machine.slice/machine-libpod_pod_{ID[::-1]}.slice/libpod-{ID}.scope\n", ID[:12]),
        ("0::/lxc.payload.web-1/system.slice/x.service\n", "web-1"),
        ("0::/machine.slice/machine-deb.scope/payload\n", "deb"),
        ("0::/lxc/\x1b[31mred\n", None),
    ],
)
def test_the_container_by_its_cgroup(cgroup: str, container: str | None) -> None:
    assert container_of(cgroup) == container


@pytest.mark.parametrize(
    ("cgroup", "service"),
    [
        ("0::/system.slice/redis-server.service\n", "redis-server"),
        ("0::/system.slice/system-postgresql.slice/postgresql@15-main.service\n", "postgresql@15-main"),
        ("1:name=systemd:/system.slice/nginx.service\n0::/\n", "nginx"),
        (f"0::/system.slice/docker.service/docker/{ID}\n", None),
        (f"0::/system.slice/docker-{ID}.scope\n", None),
        ("0::/user.slice/user-1000.slice/user@1000.service/app.slice/it.service\n", None),
        ("0::/\n", None),
    ],
)
def test_the_service_by_its_cgroup(cgroup: str, service: str | None) -> None:
    assert service_of(cgroup) == service


NUMBERS_HERE = """
import os, sys
from sidestep.observe.processes import Processes
mine, first = os.stat("/proc/self/ns/pid").st_ino, int(sys.argv[1])
print(*(Processes().here(1, pid, (mine, first)) for pid in (1, 2, 3, 99)), Processes().here(1, 2, (2, first)))
"""


# CI is root; another user has no capabilities to lose, and is not told namespaces anyway.
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can lose its capabilities")
def test_who_may_not_look_at_namespaces_finds_a_family_by_its_first_process() -> None:
    contained = ["unshare", "--pid", "--fork", "--kill-child", "sh", "-c", "sleep 60 & sleep 60 & echo; wait"]
    with subprocess.Popen(contained, stdout=subprocess.PIPE) as started:
        assert started.stdout is not None
        started.stdout.readline()
        (first,) = _children(started.pid)
        argv = [*POWERLESS, sys.executable, "-c", NUMBERS_HERE, str(first)]
        wanted = [first, *sorted(_children(first)), 0, 0]

        def found() -> list[int]:
            shown = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60).stdout
            return [int(number) for number in shown.split()]

        eventually(
            lambda: found() == wanted
        )  # a namespace of another test, which soon ends, may have these numbers as well
        started.kill()


NUMBERS_GONE = """
import sys
from sidestep.observe.processes import Processes
print(*(Processes().gone(int(sys.argv[1]), pid) for pid in (1, 2, 3, 99)))
"""
FIRST_THREAD_ENDS = """
import ctypes, platform, threading, time
threading.Thread(target=time.sleep, args=(1000,)).start()
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)
"""


def test_which_processes_have_ended() -> None:
    assert not Processes().gone(0, os.getpid())
    assert not Processes().gone(0, 1)  # another user's, unless root looks
    assert not Processes().gone(1, 1)  # in a namespace that nobody is in
    with subprocess.Popen(["true"]) as program:
        eventually(lambda: _state(program.pid) == "Z")
        assert Processes().gone(0, program.pid)
        program.wait()
        assert Processes().gone(0, program.pid)


def test_a_process_lives_on_without_its_first_thread() -> None:
    with subprocess.Popen([sys.executable, "-c", FIRST_THREAD_ENDS]) as program:
        eventually(lambda: _state(program.pid) == "Z")
        assert not Processes().gone(0, program.pid)
        program.kill()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root sees into all namespaces, and can lose its capabilities")
def test_which_processes_of_a_container_have_ended() -> None:
    contained = ["unshare", "--pid", "--fork", "--kill-child", "sh", "-c", "sleep 60 & sleep 60 & echo; wait"]
    with subprocess.Popen(contained, stdout=subprocess.PIPE) as started:
        assert started.stdout is not None
        started.stdout.readline()
        (first,) = _children(started.pid)
        namespace = Path(f"/proc/{first}/ns/pid").stat().st_ino
        asked = [sys.executable, "-c", NUMBERS_GONE, str(namespace)]
        by_root, powerless = (
            subprocess.run([*before, *asked], capture_output=True, text=True, check=True, timeout=60).stdout.split()
            for before in ([], POWERLESS)
        )
        started.kill()
    assert by_root == ["False", "False", "False", "True"]
    assert powerless == ["False"] * 4


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
