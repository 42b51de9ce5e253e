"""Policies of several files, users and groups, on a disk made for it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidestep import limits
from sidestep.policy import PolicyError, Role, Rule
from sidestep.policy.disk import DiskFiles, DiskNames
from sidestep.policy.load import Loaded, compile_all, load


class People(DiskNames):
    """Two users and a group."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def uid(self, name: str) -> int | None:
        self.asked.append(name)
        return {"alice": 1000, "bob": 1001}.get(name)

    def gid(self, name: str) -> int | None:
        self.asked.append(f"@{name}")
        return {"dba": 7}.get(name)


def write(directory: Path, **files: str) -> Path:
    """Files by name, `policy` among them: the place."""
    for name, text in files.items():
        (directory / name).write_text(text)
    return directory / "policy"


def loaded(place: Path, *, required: bool = True) -> Loaded:
    return load(place, DiskFiles(), People(), required=required)


def texts(found: Loaded) -> list[str]:
    assert found.problems == []
    return [str(statement) for statement in found.statements]


# ---- includes ----


def test_what_is_included_stands_where_it_is_included(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    place = write(
        tmp_path,
        policy="use tcp connect a *:*\ninclude sub/inner\nuse tcp connect d *:*\n",
        beside="use tcp connect c *:*",
    )
    (tmp_path / "sub/inner").write_text("use tcp connect b *:*\ninclude ../beside\n")
    found = loaded(place)
    assert texts(found) == [f"use tcp connect {name} *:*" for name in "abcd"]
    rules = [statement for statement in found.statements if isinstance(statement, Rule)]
    assert [(Path(rule.origin.file).name, rule.origin.line) for rule in rules] == [
        ("policy", 1), ("inner", 1), ("beside", 1), ("policy", 3),
    ]  # fmt: skip
    assert [path.resolve() for path in found.files] == [
        tmp_path / "policy", tmp_path / "sub/inner", tmp_path / "beside",
    ]  # fmt: skip


def test_globs_are_taken_in_order_and_may_match_nothing(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    place = write(tmp_path, policy="include d/*.conf\ninclude none/*.conf\n")
    for name in ("20-b.conf", "10-a.conf", "30-c.conf~", ".hidden.conf"):
        (tmp_path / "d" / name).write_text(f"use tcp connect {name} *:*")
    found = loaded(place)
    assert texts(found) == ["use tcp connect 10-a.conf *:*", "use tcp connect 20-b.conf *:*"]
    assert [glob.pattern for glob in found.globs] == ["d/*.conf", "none/*.conf"]


def test_an_absolute_include_and_a_directory_with_a_glob_in_its_name(tmp_path: Path) -> None:
    odd = tmp_path / "a[b]"
    odd.mkdir()
    place = write(odd, policy=f"include {tmp_path}/else*\ninclude in*\n", inner="use tcp connect b *:*")
    (tmp_path / "elsewhere").write_text("use tcp connect a *:*")
    assert texts(loaded(place)) == ["use tcp connect a *:*", "use tcp connect b *:*"]


def test_a_circle_is_told(tmp_path: Path) -> None:
    place = write(tmp_path, policy="\ninclude other", other="include policy")
    (problem,) = loaded(place).problems
    assert (problem.file, problem.line, problem.column, problem.word) == (str(tmp_path / "other"), 1, 9, "policy")
    assert problem.message == f"{place} includes {tmp_path / 'other'} includes {place}, in a circle"


def test_a_circle_over_links_comes_to_an_end(tmp_path: Path) -> None:
    place = write(tmp_path, policy="include d/policy")
    (tmp_path / "d").symlink_to(".")
    (problem,) = loaded(place).problems
    assert f"more than {limits.POLICY_INCLUDE_DEPTH_MAX} deep" in problem.message


def test_a_missing_include_is_told_where_it_is_included(tmp_path: Path) -> None:
    place = write(tmp_path, policy="\n include  gone.conf # here")
    (problem,) = loaded(place).problems
    assert (problem.line, problem.text) == (2, "include  gone.conf")
    assert "gone.conf does not exist" in problem.message


def test_a_place_may_be_missing_unless_it_was_asked_for(tmp_path: Path) -> None:
    assert loaded(tmp_path / "policy", required=False) == Loaded(files=[tmp_path / "policy"])
    (problem,) = loaded(tmp_path / "policy").problems
    assert str(problem) == f"{tmp_path / 'policy'}: error: {tmp_path / 'policy'} does not exist"


# ---- bounds ----


def test_too_many_statements_are_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "POLICY_RULES_MAX", 3)
    place = write(tmp_path, policy="use tcp connect * *:*\n" * 3)
    assert loaded(place).problems == []
    write(tmp_path, policy="include more\n" + "use tcp connect * *:*\n" * 3, more="use tcp connect * *:*\n")
    (problem,) = loaded(place).problems
    assert (problem.line, len(loaded(place).statements)) == (4, 3)
    assert "more than 3 statements" in problem.message


def test_too_many_files_are_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "POLICY_FILES_MAX", 3)
    place = write(tmp_path, policy="include x*", x1="", x2="", x3="")
    assert loaded(place).problems == []
    write(tmp_path, x4="")
    (problem,) = loaded(place).problems
    assert "more than 3 included files" in problem.message


def test_too_long_a_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "POLICY_BYTES_MAX", 100)
    place = write(tmp_path, policy="include more #".ljust(60), more="#".ljust(40))
    assert loaded(place).problems == []
    write(tmp_path, more="#".ljust(41))
    (problem,) = loaded(place).problems
    assert "longer than 100 bytes" in problem.message


def test_an_include_of_itself_in_breadth_has_an_end(tmp_path: Path) -> None:
    place = write(tmp_path, policy="include a*", **{f"a{n}": "include b*" for n in range(20)})
    write(tmp_path, **{f"b{n}": "" for n in range(20)})
    found = loaded(place)
    assert len(found.files) == limits.POLICY_FILES_MAX + 1
    assert len(found.problems) <= limits.POLICY_PROBLEMS_MAX + 1


# ---- users ----


def test_users_and_groups_become_numbers(tmp_path: Path) -> None:
    place = write(tmp_path, policy="use tcp connect * *:* user alice group dba\npair bob @dba\npair alice 5")
    found = loaded(place)
    assert (found.uids, found.gids) == ({"alice": 1000, "bob": 1001}, {"dba": 7})
    policy = compile_all([found])
    assert str(policy.may_pair(1, {7}, 1001, ())) == "pair bob @dba"
    assert str(policy.may_pair(5, (), 1000, ())) == "pair alice 5"
    assert policy.may_pair(1000, (), 1001, ()) is None


def test_a_user_who_is_not_here_is_told(tmp_path: Path) -> None:
    place = write(tmp_path, policy="use tcp connect carol *:* user carol\npair @carol *\npair @carol *")
    people = People()
    problems = load(place, DiskFiles(), people).problems
    assert [(problem.line, problem.column, problem.word) for problem in problems] == [
        (1, 32, "carol"), (2, 7, "carol"), (3, 7, "carol"),
    ]  # fmt: skip
    assert problems[0].message == "there is no user 'carol' here"
    assert problems[1].message == "there is no group 'carol' here"
    assert people.asked == ["carol", "@carol"]  # each once, however often it is named


def test_the_machines_own_users_are_known() -> None:
    names = DiskNames()
    assert (names.uid("root"), names.gid("root")) == (0, 0)
    assert (names.uid("no such user"), names.gid("no such group")) == (None, None)


# ---- several places ----


def test_what_an_earlier_place_says_comes_first(tmp_path: Path) -> None:
    mine = write(tmp_path, policy="use tcp connect a *:*")
    (tmp_path / "system").write_text("use sdp connect * *:*")
    policy = compile_all([loaded(mine), loaded(tmp_path / "system")])
    assert [rule.target for rule in policy.rules] == ["tcp", "sdp"]
    assert policy.rules[0].role is Role.CONNECT


def test_whatever_is_wrong_anywhere_is_one_error(tmp_path: Path) -> None:
    mine = write(tmp_path, policy="use\nfoo")
    (tmp_path / "system").write_text("bar")
    with pytest.raises(PolicyError) as error:
        compile_all([loaded(mine), loaded(tmp_path / "system")])
    assert [(Path(problem.file).name, problem.line) for problem in error.value.problems] == [
        ("policy", 1), ("policy", 2), ("system", 1),
    ]  # fmt: skip
    assert str(error.value).startswith(f"{mine}:1:4: error: the line ends where what to use is expected (and 2 more);")


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(data=st.one_of(st.binary(max_size=60), st.binary(max_size=20).map(lambda name: b"include " + name)))
def test_arbitrary_bytes_are_a_policy_or_a_policy_error(data: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    place = tmp_path_factory.getbasetemp() / "fuzzed"
    place.write_bytes(data)
    found = load(place, DiskFiles(), DiskNames())
    if not found.problems:
        compile_all([found])
        return
    with pytest.raises(PolicyError) as error:
        compile_all([found])
    assert error.value.problems == tuple(found.problems)
    assert error.value.remedy


# ---- the disk ----


def test_what_is_no_file_is_told(tmp_path: Path) -> None:
    place = write(tmp_path, policy="include pipe\ninclude dir\ninclude /dev/zero\ninclude secret\n")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "dir").mkdir()
    (tmp_path / "secret").symlink_to("secret")
    problems = loaded(place).problems
    assert [problem.message for problem in problems] == [
        f"{tmp_path}/pipe is not a file", f"{tmp_path}/dir is a directory", "/dev/zero is not a file",
        f"{tmp_path}/secret cannot be read: Too many levels of symbolic links",
    ]  # fmt: skip
    assert problems[1].remedy == f"include {tmp_path}/dir/*.conf"


def test_dev_null_says_nothing() -> None:
    assert loaded(Path("/dev/null")).statements == []
    assert loaded(Path("/dev/null")).problems == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize(("change", "message"), [
    (lambda place: os.chown(place, 12345, 0), "belongs to user 12345"),
    (lambda place: place.chmod(0o664), "others than the owner of"),
    (lambda place: place.parent.chmod(0o777), "others than the owner of"),
    (lambda place: os.chown(place.parent.parent, 12345, 0), "belongs to user 12345"),
])  # fmt: skip
def test_what_decides_for_all_must_be_nobodys_to_change(
    change: object, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = DiskFiles(owners=frozenset({0}))
    # below /run: every directory above it is root's
    directory = Path("/run") / f"sidestep-test-{os.getpid()}"
    inner = directory / "inner"
    inner.mkdir(parents=True)
    try:
        place = write(inner, policy="use tcp connect * *:*")
        place.chmod(0o644)
        assert load(place, files, People()).problems == []
        link = directory / "link"
        link.symlink_to(place)
        assert callable(change)
        change(place)
        for path in (place, link):  # a link is as good as where it leads
            (problem,) = load(path, files, People()).problems
            assert message in problem.message
            assert problem.remedy
    finally:
        for path in (directory / "link", inner / "policy"):
            path.unlink(missing_ok=True)
        inner.rmdir()
        directory.rmdir()
