"""The policy in force follows its files, whatever is done to them, and keeps the last good one."""

from __future__ import annotations

import os
import select
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from ipaddress import ip_address
from pathlib import Path

import pytest

from sidestep import limits
from sidestep.policy import Role, Subject
from sidestep.policy.disk import DiskNames
from sidestep.provider.policy_files import PolicyFiles
from sidestep.settings import PolicyPlace, policy_places

WHO = Subject(("x",), 1000, frozenset())
TCP, SDP = "use tcp connect * *:*\n", "use sdp connect * *:*\n"


class Following:
    """Policy files, and what has been told of them."""

    def __init__(self, *places: PolicyPlace, owners: frozenset[int] | None = None) -> None:
        self.log: list[str] = []
        self.changes = 0
        self.files = PolicyFiles(places, log=self.log.append, on_change=self._changed, owners=owners)

    def _changed(self) -> None:
        self.changes += 1

    @property
    def target(self) -> str:
        return self.files.policy.decide(Role.CONNECT, WHO, ip_address("10.0.0.1"), 1).target

    def turn(self) -> None:
        """What a loop does: handles all that the kernel has told by now. It tells at once, in the call that changes."""
        fd = self.files.fileno()
        assert fd is not None
        while select.select([fd], [], [], 0)[0]:
            self.files.handle_readable()


Follow = Callable[..., Following]


@pytest.fixture
def follow(closing: ExitStack) -> Follow:
    def start(*places: Path | PolicyPlace, owners: frozenset[int] | None = None) -> Following:
        given = [place if isinstance(place, PolicyPlace) else PolicyPlace(place) for place in places]
        following = Following(*given, owners=owners)
        closing.callback(following.files.close)
        return following

    return start


# ---- what may happen to a file ----


def overwrite(path: Path, text: str) -> None:
    path.write_text(text)


def replace(path: Path, text: str) -> None:
    """As editors do."""
    path.with_name("new~").write_text(text)
    path.with_name("new~").rename(path)


def recreate(path: Path, text: str) -> None:
    path.unlink()
    path.write_text(text)


def link(path: Path, text: str) -> None:
    path.with_name("elsewhere").write_text(text)
    path.unlink()
    path.symlink_to("elsewhere")


def hard_link(path: Path, text: str) -> None:
    path.with_name("elsewhere").write_text(text)
    path.unlink()
    path.hardlink_to(path.with_name("elsewhere"))


def replace_directory(path: Path, text: str) -> None:
    new = path.parent.with_name("new-directory")
    new.mkdir()
    (new / path.name).write_text(text)
    path.parent.rename(path.parent.with_name("old-directory"))
    new.rename(path.parent)


def recreate_directory(path: Path, text: str) -> None:
    shutil.rmtree(path.parent)
    path.parent.mkdir()
    path.write_text(text)


def replace_ancestor(path: Path, text: str) -> None:
    top = path.parent.parent
    top.rename(top.with_name("old-top"))
    path.parent.mkdir(parents=True)
    path.write_text(text)


WAYS = [overwrite, replace, recreate, link, hard_link, replace_directory, recreate_directory, replace_ancestor]


@pytest.mark.parametrize("change", WAYS)
def test_a_change_is_followed_and_so_is_the_next(
    follow: Follow, tmp_path: Path, change: Callable[[Path, str], None]
) -> None:
    path = tmp_path / "top" / "etc" / "policy.conf"
    path.parent.mkdir(parents=True)
    path.write_text(TCP)
    following = follow(path)
    assert following.target == "tcp"
    change(path, SDP)
    following.turn()
    assert following.target == "sdp"
    path.write_text(TCP)
    following.turn()
    assert following.target == "tcp"
    assert following.files.errors == ()


@pytest.mark.parametrize("step_by_step", [True, False])
def test_a_file_and_its_directories_may_come_and_go(follow: Follow, tmp_path: Path, step_by_step: bool) -> None:
    path = tmp_path / "a" / "b" / "policy.conf"
    following = follow(path)
    assert (following.target, following.files.errors) == ("both", ())
    for directory in (path.parent.parent, path.parent):
        directory.mkdir()
        if step_by_step:
            following.turn()
    path.write_text(TCP)
    following.turn()
    assert following.target == "tcp"
    shutil.rmtree(tmp_path / "a")
    following.turn()
    assert following.target == "both"
    path.parent.mkdir(parents=True)
    path.write_text(SDP)
    following.turn()
    assert following.target == "sdp"


def test_links_are_followed_at_every_step(follow: Follow, tmp_path: Path) -> None:
    """As a ConfigMap is mounted: policy.conf -> ..data/policy.conf, ..data -> a directory that is exchanged."""
    for name, text in (("one", TCP), ("two", SDP)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "policy.conf").write_text(text)
    (tmp_path / "..data").symlink_to("one")
    (tmp_path / "policy.conf").symlink_to("..data/policy.conf")
    following = follow(tmp_path / "policy.conf")
    assert following.target == "tcp"
    (tmp_path / "..tmp").symlink_to(tmp_path / "two")
    (tmp_path / "..tmp").rename(tmp_path / "..data")
    following.turn()
    assert following.target == "sdp"
    (tmp_path / "two" / "policy.conf").write_text(TCP)
    following.turn()
    assert following.target == "tcp"


def test_included_files_are_followed_missing_ones_too(follow: Follow, tmp_path: Path) -> None:
    path = tmp_path / "policy.conf"
    path.write_text(f"include d/*/*.conf\ninclude more\n{TCP}")
    following = follow(path)
    assert "more does not exist" in following.files.errors[0].message
    (tmp_path / "more").write_text("")
    following.turn()
    assert (following.files.errors, following.target) == ((), "tcp")
    (tmp_path / "d" / "x").mkdir(parents=True)
    following.turn()
    (tmp_path / "d" / "x" / "1.conf").write_text(SDP)
    following.turn()
    assert following.target == "sdp"
    (tmp_path / "d" / "x" / "1.conf").write_text("")
    following.turn()
    assert following.target == "tcp"
    (tmp_path / "more").write_text(SDP)
    following.turn()
    assert following.target == "sdp"


def test_a_file_that_is_being_written_is_not_read(follow: Follow, tmp_path: Path) -> None:
    path = tmp_path / "policy.conf"
    following = follow(path)
    with open(path, "w") as file:
        file.write(TCP)
        file.flush()
        following.turn()
        assert (following.target, following.files.generation) == ("both", 1)
        file.write("use sdp connect x *:*\n")
    following.turn()
    assert (following.target, len(following.files.policy.rules), following.files.generation) == ("tcp", 2, 2)


@pytest.mark.parametrize("inner", ["d/inner", "inner"])
def test_a_change_while_it_is_read_is_not_missed(tmp_path: Path, closing: ExitStack, inner: str) -> None:
    """The first look finds a file in a directory that is not watched yet."""
    (tmp_path / "d").mkdir()
    (tmp_path / inner).write_text("use tcp connect * *:* user alice\n")
    (tmp_path / "policy.conf").write_text(f"include {inner}\n")

    class Meddling(DiskNames):
        def uid(self, name: str) -> int | None:
            (tmp_path / inner).write_text(SDP)
            return WHO.uid

    told: list[str] = []
    files = PolicyFiles([PolicyPlace(tmp_path / "policy.conf")], log=told.append, names=Meddling())
    closing.callback(files.close)
    fd = files.fileno()
    assert fd is not None
    while select.select([fd], [], [], 0)[0]:
        files.handle_readable()
    assert [str(rule) for rule in files.policy.rules] == [SDP.strip()]


def test_other_files_do_not_wake_the_rules(follow: Follow, tmp_path: Path) -> None:
    path = tmp_path / "policy.conf"
    path.write_text(TCP)
    following = follow(path)
    (tmp_path / "other.conf").write_text(SDP)
    (tmp_path / "directory").mkdir()
    following.turn()
    path.read_text()
    following.turn()
    assert (following.changes, following.files.generation) == (0, 1)


# ---- what is wrong ----


def test_the_last_good_policy_stays_in_force(follow: Follow, tmp_path: Path) -> None:
    path = tmp_path / "policy.conf"
    path.write_text(TCP)
    following = follow(path)
    path.write_text(f"{SDP}use sdp conect * *:*\n")
    following.turn()
    assert following.target == "tcp"
    (problem,) = following.files.errors
    assert (problem.line, problem.word) == (2, "conect")
    assert any(
        "policy.conf:2:9: error: 'conect' is not a role; did you mean 'connect'?" in line for line in following.log
    )
    assert f"in force until that is mended: {path} as it was" in following.log[-1]
    assert following.files.as_json()["errors"] == 1
    path.write_text(SDP)
    following.turn()
    assert (following.target, following.files.errors) == ("sdp", ())
    assert following.log[-1] == "policy: 1 rules are in force now"
    assert following.changes == 2


def test_a_bad_file_at_the_start_says_nothing_and_that_is_told(follow: Follow, tmp_path: Path) -> None:
    path = tmp_path / "policy.conf"
    path.write_text(TCP + "nonsense\n" * 7)
    following = follow(path)
    assert (following.target, len(following.files.errors)) == ("both", 7)
    assert len(following.log) == 6
    assert f"2 more problems; in force until that is mended: {path} not at all" in following.log[-1]


def test_a_fault_in_one_place_leaves_the_other(follow: Follow, tmp_path: Path) -> None:
    mine, system = tmp_path / "mine", tmp_path / "system"
    mine.write_text("nonsense")
    system.write_text(TCP)
    following = follow(mine, system)
    assert following.target == "tcp"
    mine.write_text(SDP)
    following.turn()
    assert following.target == "sdp"  # the user's come first
    mine.write_text("nonsense")
    system.write_text("use tcp connect other *:*\n")
    following.turn()
    assert [str(rule) for rule in following.files.policy.rules] == [SDP.strip(), "use tcp connect other *:*"]


def test_a_place_that_was_asked_for_must_be_there(follow: Follow, tmp_path: Path) -> None:
    following = follow(PolicyPlace(tmp_path / "policy.conf", required=True))
    assert "does not exist" in following.files.errors[0].message
    (tmp_path / "policy.conf").write_text(TCP)
    following.turn()
    assert (following.target, following.files.errors) == ("tcp", ())


def test_without_watches_the_policy_is_read_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "policy.conf").write_text(TCP)

    def fail() -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("sidestep.provider.policy_files.FileWatch", fail)
    following = Following(PolicyPlace(tmp_path / "policy.conf"))
    assert (following.target, following.files.fileno()) == ("tcp", None)
    assert following.files.blind == "files cannot be watched: Too many open files"
    assert "may go unnoticed" in following.log[-1]
    following.files.close()


def test_watches_have_a_bound(follow: Follow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.conf").write_text("")
    monkeypatch.setattr(limits, "POLICY_WATCHES_MAX", len(tmp_path.parts) + 1)
    (tmp_path / "policy.conf").write_text("include */x.conf")
    following = follow(tmp_path / "policy.conf")
    assert following.files.errors == ()
    assert "would have to be watched" in (following.files.blind or "")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_what_others_could_write_is_not_taken(follow: Follow, tmp_path: Path) -> None:
    path = tmp_path / "policy.conf"
    path.write_text(TCP)
    following = follow(path, owners=frozenset({0}))
    assert following.target == "both"  # the directory for temporary files is everybody's
    assert "can write to it" in following.files.errors[0].message


# ---- where ----


def test_where_a_policy_comes_from() -> None:
    system = "may:/etc/sidestep/policy.conf"
    home = {"HOME": "/home/a"}

    def found(**environment: str) -> list[str]:
        return [str(place) for place in policy_places(environment)]

    assert found(**home) == ["may:/home/a/.config/sidestep/policy.conf", system]
    assert found(**home, XDG_CONFIG_HOME="/x") == ["may:/x/sidestep/policy.conf", system]
    assert found(**home, SIDESTEP_POLICY="/etc/libsdp.conf") == ["must:/etc/libsdp.conf", system]
    assert found(SIDESTEP_POLICY="") == [system]
    for place in policy_places(home | {"SIDESTEP_POLICY": "/a:b"}):
        assert PolicyPlace.parse(str(place)) == place
