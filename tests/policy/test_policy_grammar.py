"""The language of policy files: what is accepted, what is not, and how that is told."""

from __future__ import annotations

from ipaddress import IPv4Network, IPv6Network

import policy_strategies as some
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidestep import limits
from sidestep.policy.grammar import parse
from sidestep.policy.model import Include, Log, Origin, Pair, Problem, Rings, Role, Rule, Side, Statement

LIBSDP_DEFAULT = b"""\
# libsdp.conf - configuration file for libsdp
#
# Comments may be in Latin-1: \xe9
log min-level 9 destination file libsdp.log
use both server * *:*
use both client * *:*
"""


def statement_of(line: str) -> Statement:
    (statement,) = parse(line.encode()).statements
    return statement


def problem_of(line: str) -> Problem:
    document = parse(line.encode(), "p.conf")
    assert document.statements == ()
    (problem,) = document.problems
    return problem


# ---- libsdp ----


def test_the_default_file_of_libsdp_is_taken() -> None:
    document = parse(LIBSDP_DEFAULT)
    assert document.problems == ()
    assert document.statements == (
        Log("file", "libsdp.log", 9), Rule("both", Role.LISTEN), Rule("both", Role.CONNECT),
    )  # fmt: skip


@pytest.mark.parametrize(("line", "expected"), [
    ("use sdp server ttcp *:5001", Rule("sdp", Role.LISTEN, "ttcp", None, (5001, 5001))),
    ("use tcp client * 192.168.3.0/24:*", Rule("tcp", Role.CONNECT, "*", IPv4Network("192.168.3.0/24"))),
    ('use both connect "java*" *:*', Rule("both", Role.CONNECT, "java*")),
    ("use sdp listen * 10.1.1.1/24 : 80 - 90", Rule("sdp", Role.LISTEN, "*", IPv4Network("10.1.1.0/24"), (80, 90))),
    ("use sdp listen * */24:80", Rule("sdp", Role.LISTEN, "*", None, (80, 80))),
    ("use tcp connect * *:*#comment", Rule("tcp", Role.CONNECT)),
    ("\tuse  tcp\tconnect * *:* \r", Rule("tcp", Role.CONNECT)),
    ("log", Log()),
    ("log destination stderr", Log("stderr")),
    ("log destination syslog min-level 1", Log("syslog", None, 1)),
    ('log min-level 3 destination file "/tmp/my log"', Log("file", "/tmp/my log", 3)),
])  # fmt: skip
def test_libsdp_statements(line: str, expected: Statement) -> None:
    assert statement_of(line) == expected


# ---- what is new ----


@pytest.mark.parametrize("endpoint", [
    "[2001:db8::]/32:80", "[2001:db8::/32]:80", "2001:db8::/32:80", "[2001:db8::1]/32:80", "2001:db8:: / 32 : 80",
])  # fmt: skip
def test_ipv6_networks(endpoint: str) -> None:
    expected = Rule("sdp", Role.CONNECT, "*", IPv6Network("2001:db8::/32"), (80, 80))
    assert statement_of(f"use sdp connect * {endpoint}") == expected


@pytest.mark.parametrize(("endpoint", "network", "ports"), [
    ("[::1]:80", "::1/128", (80, 80)),
    ("::1:*", "::1/128", (0, 65535)),
    ("::1:80-90", "::1/128", (80, 90)),
    ("::1 :80", "::1/128", (80, 80)),
    ("::1: 80", "::1/128", (80, 80)),
    ("1:2:3:4:5:6:7:8:80", "1:2:3:4:5:6:7:8/128", (80, 80)),
    ("[::]/0:1", "::/0", (1, 1)),
])  # fmt: skip
def test_ipv6_addresses(endpoint: str, network: str, ports: tuple[int, int]) -> None:
    assert statement_of(f"use sdp connect * {endpoint}") == Rule("sdp", Role.CONNECT, "*", IPv6Network(network), ports)


@pytest.mark.parametrize("endpoint", ["[::ffff:10.0.0.0]/104:*", "::ffff:a00:0/104:*", "10.0.0.0/8:*"])
def test_a_mapped_network_is_an_ipv4_network(endpoint: str) -> None:
    assert statement_of(f"use sdp connect * {endpoint}") == Rule("sdp", Role.CONNECT, "*", IPv4Network("10.0.0.0/8"))


@pytest.mark.parametrize(("line", "expected"), [
    ("use sdp over roce connect a *:1", Rule("sdp", Role.CONNECT, "a", None, (1, 1), over="roce")),
    ("use sdp over x-1 listen over *:1", Rule("sdp", Role.LISTEN, "over", None, (1, 1), over="x-1")),
    ("use x-1 connect a *:1 user alice", Rule("x-1", Role.CONNECT, "a", None, (1, 1), "alice")),
    ("use tcp connect a *:1 group 5 user 1000", Rule("tcp", Role.CONNECT, "a", None, (1, 1), 1000, 5)),
    ('use tcp connect a *:1 user * group "a b"', Rule("tcp", Role.CONNECT, "a", None, (1, 1), None, "a b")),
    ("use tcp connect user *:1 user user", Rule("tcp", Role.CONNECT, "user", None, (1, 1), "user")),
    ("pair postgres @www-data", Pair((Side("postgres"), Side("www-data", True)))),
    ("pair 0 *", Pair((Side(0), Side()))),
    ('pair "@domain users" @100', Pair((Side("domain users", True), Side(100, True)))),
    ("rings files postgres", Rings(True, "postgres")),
    ('rings sockets "my server*"', Rings(False, "my server*")),
    ("include policy.d/*.conf", Include("policy.d/*.conf")),
    ('include "my rules # 1.conf"', Include("my rules # 1.conf")),
])  # fmt: skip
def test_extensions(line: str, expected: Statement) -> None:
    assert statement_of(line) == expected


# ---- what is wrong ----


@pytest.mark.parametrize(("line", "column", "word", "message", "remedy"), [
    ("uze sdp connect * *:*", 1, "uze", "does not begin a statement", "did you mean 'use'?"),
    ("use SDP connect * *:*", 5, "SDP", "cannot be the name of a protocol", "did you mean 'sdp'?"),
    ("use connect sdp * *:*", 5, "connect", "is a role", "use both|tcp|PROTOCOL [over TRANSPORT] connect|listen"),
    ("use tcp over roce connect * *:*", 9, "over", "goes over no transport", "behind a protocol"),
    ("use both over roce connect * *:*", 10, "over", "goes over no transport", "behind a protocol"),
    ("use sdp over connect * *:*", 14, "connect", "is a role", "use sdp over roce"),
    ("use sdp over Roce connect * *:*", 14, "Roce", "cannot be the name of a transport", "use sdp over roce"),
    ("use sdp over", 13, "", "ends where a transport is expected", "use sdp over roce"),
    ("use sdp conect * *:*", 9, "conect", "is not a role", "did you mean 'connect'?"),
    ("use sdp 'connect' * *:*", 9, "'connect'", "is not a role", "connect"),
    ('use "sdp" connect * *:*', 5, '"sdp"', "not a name in quotes", "both, tcp"),
    ("use sdp", 8, "", "ends where a role is expected", "listen"),
    ("use sdp connect", 16, "", "ends where a program is expected", "PROGRAM"),
    ("use sdp connect *:*", 20, "", "ends where ADDRESS:PORT is expected", "PROGRAM ADDRESS"),
    ('use sdp connect "" *:*', 17, '""', "a program is empty", "*"),
    ('use sdp connect "java *:*', 17, '"java', "none closes it", "quotes around the whole name"),
    ('use sdp connect ja"va" *:*', 17, 'ja"va"', "stands for itself nowhere", "quotes around the whole name"),
    ('use sdp connect * "*:*"', 19, '"*:*"', "not a name in quotes", "ADDRESS[/PREFIX]:PORT"),
    ("use sdp connect * 1.2.3.4", 26, "", "a port are missing", "*"),
    ("use sdp connect * 1.2.3.4:", 27, "", "a port is missing", "*"),
    ("use sdp connect * 1.2.3.4 80", 26, "", "a port are missing", "*"),
    ("use sdp connect * 1.2.3.4:http", 27, "http", "is not a port", "from 0 to 65535"),
    ("use sdp connect * 1.2.3.4:080", 27, "080", "is not a port", "without leading zeros"),
    ("use sdp connect * 1.2.3.4:65536", 27, "65536", "is not a port", "from 0 to 65535"),
    ("use sdp connect * 1.2.3.4:1-", 29, "", "a port is missing", "two of them as in 80-90"),
    ("use sdp connect * 1.2.3.4:90-80", 27, "90-80", "from a higher port to a lower one", "write 80-90"),
    ("use sdp connect * 1.2.3:80", 19, "1.2.3", "is not an address", "IPv4 or IPv6"),
    ("use sdp connect * 01.2.3.4:80", 19, "01.2.3.4", "is not an address", "IPv4 or IPv6"),
    ("use sdp connect * a.example:80", 19, "a.example", "is not an address", "not looked up"),
    ("use sdp connect * fe80::1%eth0:80", 19, "fe80::1%eth0", "is not an address", "leave out the interface"),
    ("use sdp connect * 1.2.3.4/33:80", 27, "33", "is not the length of a prefix", "from 0 to 32"),
    ("use sdp connect * 1.2.3.4/:80", 27, ":", "is not the length of a prefix", "from 0 to 32"),
    ("use sdp connect * ::/129:80", 22, "129", "is not the length of a prefix", "from 0 to 128"),
    ("use sdp connect * */x:80", 21, "x", "is not the length of a prefix", "128"),
    ("use sdp connect * 10.0.0.0/255.0.0.0:80", 28, "255.0.0.0", "is not the length of a prefix", "not a mask"),
    ("use sdp connect * ::1:80", 19, "::1:80", "may be an address without a port", "[::1]:80 or [::1:80]:*"),
    ("use sdp connect * [1.2.3.4]:80", 20, "1.2.3.4", "brackets are for IPv6", "without them"),
    ("use sdp connect * [::1:80", 19, "[::1:80", "no bracket closes", "[ADDRESS]/PREFIX:PORT"),
    ("use sdp connect * [::1]", 24, "", "a port are missing", "*"),
    ("use sdp connect * *:* usr bob", 23, "usr", "not expected behind the port", "did you mean 'user'?"),
    ("use sdp connect * *:* user", 27, "", "ends where a user is expected", "a number"),
    ("use sdp connect * *:* user a user b", 30, "user", "a second 'user'", "one rule for each"),
    ("use sdp connect * *:* user 4294967295", 28, "4294967295", "is not the number of a user", "4294967294"),
    ("pair alice", 11, "", "ends where a user is expected", "pair USER|@GROUP|*"),
    ("pair alice bob carol", 16, "carol", "one word too many", "pair USER|@GROUP|*"),
    ("pair alice @", 12, "@", "names no group", "pair USER|@GROUP|*"),
    ("pair alice @*", 12, "@*", "names no group", "pair USER|@GROUP|*"),
    ("rings", 6, "", "ends where what they have is expected", "rings files|sockets PROGRAM"),
    ("rings file postgres", 7, "file", "is nothing that rings have", "did you mean 'files'"),
    ("rings files", 12, "", "ends where a program is expected", "rings files|sockets PROGRAM"),
    ("rings files a b", 15, "b", "one word too many", "rings files|sockets PROGRAM"),
    ("include", 8, "", "ends where a file is expected", "include FILE"),
    ("include a b", 11, "b", "one word too many", 'include "my rules.conf"'),
    ("log min-level 0", 15, "0", "is not a level", "1, everything, to 9"),
    ("log min-level 1 min-level 2", 17, "min-level", "is not expected here", "log [destination"),
    ("log destination sterr", 17, "sterr", "is not a destination", "did you mean 'stderr'?"),
    ("log destination file", 21, "", "ends where a file is expected", "file NAME"),
    ("use tcp connect \x07 *:*", 17, " ", "not text, or not UTF-8", "UTF-8"),
])  # fmt: skip
def test_a_bad_line_is_told_with_the_word_and_the_remedy(
    line: str, column: int, word: str, message: str, remedy: str
) -> None:
    found = problem_of(f"# first\n{line}")
    assert (found.file, found.line, found.column, found.word) == ("p.conf", 2, column, word)
    assert message in found.message
    assert remedy in found.remedy


def test_latin_1_in_a_statement_is_told() -> None:
    (problem,) = parse(b"use tcp connect caf\xe9 *:*").problems
    assert (problem.column, problem.text) == (20, "use tcp connect caf? *:*")
    assert "UTF-8" in problem.remedy


def test_a_problem_is_shown_as_compilers_do() -> None:
    assert problem_of("use sdp\tconect * *:*").report().splitlines() == [
        "p.conf:1:9: error: 'conect' is not a role",
        "    use sdp conect * *:*",
        "            ^~~~~~",
        "    hint: did you mean 'connect'? write connect (or client) for the end that connects, listen (or server) for "
        "the one that accepts",
    ]


def test_all_bad_lines_are_told_and_the_good_ones_kept() -> None:
    document = parse(b"use\nuse tcp connect * *:*\nuse\n\n#\nlog\nfoo\n", "p")
    assert [problem.line for problem in document.problems] == [1, 3, 7]
    assert [statement.origin for statement in document.statements] == [
        Origin("p", 2, "use tcp connect * *:*"), Origin("p", 6, "log"),
    ]  # fmt: skip


def test_what_is_no_policy_at_all_is_not_told_line_by_line() -> None:
    document = parse(b"\x00\n" * 10_000)
    assert len(document.problems) == limits.POLICY_PROBLEMS_MAX + 1
    assert "later words were not read" in document.problems[-1].message


def test_lengths_have_bounds() -> None:
    assert problem_of("use tcp connect " + "a" * limits.POLICY_LINE_MAX + " *:*").column == 0
    name = "a" * limits.POLICY_NAME_MAX
    assert statement_of(f"use tcp connect {name} *:*") == Rule("tcp", Role.CONNECT, name)
    assert "longer than" in problem_of(f"use tcp connect {name}a *:*").message
    assert statement_of("use tcp connect * *:* #" + "x" * 10_000) == Rule("tcp", Role.CONNECT)
    assert "cannot be the name" in problem_of(f"use {'a' * (limits.POLICY_PROTOCOL_MAX + 1)} connect * *:*").message


# ---- properties ----


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(some.rules(), some.pairs(), some.rings(), some.logs, some.includes), max_size=5))
def test_what_is_printed_reads_the_same(statements: list[Statement]) -> None:
    document = parse("\n".join(map(str, statements)).encode())
    assert document.problems == ()
    assert document.statements == tuple(statements)


_SYLLABLES = [
    b"use ", b"sdp ", b"tcp ", b"both ", b"connect ", b"server ", b"* ", b"*", b":", b"/", b"-", b"[", b"]", b'"', b"#",
    b"\n", b" ", b"\t", b"10.0.0.0", b"::", b"::ffff:", b"80", b"65536", b"user ", b"group ", b"pair ", b"@",
    b"log ", b"include ", b"destination ", b"min-level ", b"9", b"\r", b"\0", b"\xff", b"\xc2\x85", b"a", b"%eth0",
    b"\xe2\x80\xa8",
]  # fmt: skip


@pytest.mark.slow
@settings(max_examples=500, deadline=None)
@given(st.one_of(st.binary(max_size=200), st.lists(st.sampled_from(_SYLLABLES), max_size=30).map(b"".join)))
def test_whatever_a_file_holds_is_read_or_told(data: bytes) -> None:
    document = parse(data)
    lines = data.count(b"\n") + 1
    for problem in document.problems:
        assert 1 <= problem.line <= lines
        assert all(part.isprintable() for part in problem.report().split("\n"))
        assert problem.column <= len(problem.text) + 1
    again = parse("\n".join(map(str, document.statements)).encode())
    assert (again.statements, again.problems) == (document.statements, ())
