"""Units of systemd as they lie in a directory, and the drop-in for each. With a real systemd: tests/fresh."""

from __future__ import annotations

import subprocess
from pathlib import Path

import needed
import pytest
from foreign_programs import put_out_of_reach

from sidestep import config
from sidestep.errors import Misuse, Unavailable
from sidestep.installation import loader, native_library
from sidestep.observe.units import Unit, Units, Wanted, wanted

LIBRARY = native_library()


@pytest.fixture
def units(tmp_path: Path) -> Units:
    return Units(root=tmp_path)


def write(units: Units, name: str, text: str = "", place: str = "usr/lib") -> Path:
    path = units.root / place / "systemd/system" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"[X-Other]\nExecStart=/not/here\n[Service]\nExecStart=/usr/bin/true\n{text}\n")
    return path


def drop_in(units: Units, text: str = "") -> Wanted:
    """What a service of these settings gets; systemd must find no fault with it."""
    path = write(units, "it.service", text)
    made = wanted(units, units.find("it"), config.SYSTEM_SOCKET)
    (beside := path.with_name("it.service.d")).mkdir()
    (beside / "sidestep.conf").write_text(made.text)
    analyze = needed.program("systemd-analyze")
    found = subprocess.run([analyze, "--man=no", "verify", path], capture_output=True, text=True, check=False)
    assert [line for line in found.stderr.splitlines() if str(units.root) in line or "it.service" in line] == []
    return made


# ---- finding ----


def test_a_service_is_found_with_or_without_its_suffix(units: Units) -> None:
    write(units, "redis-server.service", "User=redis")
    for name in ("redis-server", "redis-server.service"):
        found = units.find(name)
        assert (found.name, found.last("User")) == ("redis-server.service", "redis")
        assert found.settings["ExecStart"] == ["/usr/bin/true"]


def test_an_alias_leads_to_its_service(units: Units) -> None:
    write(units, "redis-server.service")
    alias = write(units, "redis.service", place="etc")
    alias.unlink()
    alias.symlink_to("/lib/systemd/system/redis-server.service")
    assert units.find("redis").name == "redis-server.service"


def test_an_instance_has_a_drop_in_of_its_own(units: Units) -> None:
    write(units, "redis-server@.service", "User=redis")
    found = units.find("redis-server@one")
    assert (found.name, found.last("User")) == ("redis-server@one.service", "redis")


def test_drop_ins_count_but_ours_does_not(units: Units) -> None:
    write(units, "it.service", "User=a\nEnvironment=A=1 \\\n  B=2\n# C\\\nEnvironment=")
    write(units, "it.service.d/10-x.conf", "User=b", place="etc")
    write(units, "it.service.d/sidestep.conf", "User=c", place="etc")
    found = units.find("it")
    assert found.last("User") == "b"
    assert found.words("Environment") == []


def test_what_is_no_service_is_told(units: Units) -> None:
    write(units, "redis-server.service")
    write(units, "gone.service", place="etc").unlink()
    (units.root / "etc/systemd/system/gone.service").symlink_to("/dev/null")
    with pytest.raises(Unavailable, match=r"there is no service rediss.service.*did you mean redis-server\?"):
        units.find("rediss")
    with pytest.raises(Unavailable, match=r"gone.service is masked; systemctl unmask gone.service"):
        units.find("gone")
    for name in ("redis.socket", "../redis"):
        with pytest.raises(Misuse, match="is not a service"):
            units.find(name)


# ---- the drop-in ----


def test_a_plain_service_gets_the_environment_of_run(units: Units) -> None:
    made = drop_in(units)
    assert made.text.splitlines()[1:] == [
        "[Service]",
        f'Environment="LD_PRELOAD={LIBRARY}"',
        'Environment="SIDESTEP_SOCKET=/run/sidestep/provider"',
        'Environment="SIDESTEP_FROM_ROOT=1"',
    ]
    assert made.notes == ()


def test_what_a_service_preloads_stays_in_front(units: Units) -> None:
    made = drop_in(units, 'Environment=A=1 "LD_PRELOAD=libm.so.6 libdl.so.2"')
    assert f'Environment="LD_PRELOAD=libm.so.6 libdl.so.2 {LIBRARY}"' in made.text
    assert made.notes == ("it preloads libm.so.6 libdl.so.2 as well, before sidestep's library",)


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ("NoExecPaths=/", f'ExecPaths="{LIBRARY}"'),
        ("SystemCallFilter=@system-service", "SystemCallFilter=bind "),
        ("RestrictAddressFamilies=AF_INET AF_INET6", "RestrictAddressFamilies=AF_UNIX"),
        ("RestrictAddressFamilies=~AF_PACKET AF_UNIX", "RestrictAddressFamilies=AF_UNIX"),
        ("RestrictAddressFamilies=none", "RestrictAddressFamilies=AF_UNIX"),
        ("RootDirectory=/srv", f'BindReadOnlyPaths="{LIBRARY}" "-/run/sidestep"'),
        ("TemporaryFileSystem=/run:ro", 'BindReadOnlyPaths="-/run/sidestep"'),
    ],
)
def test_what_a_sandbox_denies_is_let_through_and_told(units: Units, setting: str, line: str) -> None:
    made = drop_in(units, setting)
    assert [one for one in made.text.splitlines() if one.startswith(line)]
    assert f"its sandbox lets through {line.partition('=')[0]}=" in "".join(made.notes)


@pytest.mark.parametrize(
    "setting",
    [
        "RestrictAddressFamilies=AF_INET AF_UNIX",
        "RestrictAddressFamilies=~AF_PACKET",
        "RestrictAddressFamilies=~AF_UNIX\nRestrictAddressFamilies=AF_UNIX",
        "MemoryDenyWriteExecute=yes\nProtectSystem=strict\nPrivateUsers=yes\nProtectProc=invisible",
    ],
)
def test_what_does_no_harm_is_left_alone(units: Units, setting: str) -> None:
    text = drop_in(units, setting).text
    assert [line for line in text.splitlines()[2:] if not line.startswith("Environment=")] == []


def test_the_user_of_a_service_is_told_who_is_paired_with_it(units: Units) -> None:
    unit = Unit("it.service", {"DynamicUser": ["yes"]})
    home = "pair it USER"
    try:
        assert home in "".join(wanted(units, unit, config.SYSTEM_SOCKET).notes)
    except Unavailable as error:  # this checkout is where only root reads
        assert "cannot be read by it" in str(error)  # noqa: PT017


# ---- what no drop-in can help ----


def test_a_static_program_is_started_by_the_loader_or_refused(units: Units) -> None:
    program = units.root / "srv/usr/bin/static"
    program.parent.mkdir(parents=True)
    source = 'void _start(void) { __asm__("hlt"); }'
    subprocess.run(["cc", "-static", "-nostdlib", "-x", "c", "-", "-o", program], input=source, text=True, check=True)
    write(units, "it.service", "RootDirectory=/srv\nExecStart=\nExecStart=-/usr/bin/static --option")
    text = wanted(units, units.find("it"), config.SYSTEM_SOCKET).text
    assert f'\nExecStart=\nExecStart=-"{loader()}" --run "/usr/bin/static" /usr/bin/static --option\n' in text
    write(units, "it.service", "RootDirectory=/srv\nExecStart=\nExecStart=@!/usr/bin/static  name --option")
    text = wanted(units, units.find("it"), config.SYSTEM_SOCKET).text
    assert f'\nExecStart=!"{loader()}" --run "/usr/bin/static" name --option\n' in text
    write(units, "it.service", "RootDirectory=/srv\nExecStart=/usr/bin/static\nMemoryDenyWriteExecute=yes")
    with pytest.raises(Unavailable, match="has MemoryDenyWriteExecute="):
        wanted(units, units.find("it"), config.SYSTEM_SOCKET)
    put_out_of_reach(program)
    with pytest.raises(Unavailable, match=r"/usr/bin/static stays on TCP: its system calls cannot be replaced"):
        wanted(units, units.find("it"), config.SYSTEM_SOCKET)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (f"InaccessiblePaths=-{LIBRARY.parent}", "does not see .*InaccessiblePaths=.*install sidestep where"),
        ("UnsetEnvironment=LD_PRELOAD", "UnsetEnvironment=LD_PRELOAD; take it out: systemctl edit it.service"),
    ],
)
def test_what_keeps_the_library_out_is_named(units: Units, setting: str, message: str) -> None:
    write(units, "it.service", setting)
    with pytest.raises(Unavailable, match=message):
        wanted(units, units.find("it"), config.SYSTEM_SOCKET)


def test_a_file_that_sets_the_same_variable_is_named(units: Units, tmp_path: Path) -> None:
    (file := tmp_path / "defaults").write_text("A=1\nLD_PRELOAD=libm.so.6\n")
    write(units, "it.service", f"EnvironmentFile=-{file}")
    with pytest.raises(Unavailable, match=rf"{file}, read by it.service, sets LD_PRELOAD.*add {LIBRARY} to it there"):
        wanted(units, units.find("it"), config.SYSTEM_SOCKET)
