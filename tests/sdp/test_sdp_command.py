"""`sidestep sdp decode`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from captures import FRAMES_OF_WHOLE, V, pcap, written
from captures import WHOLE as RECORDS
from click.testing import CliRunner, Result

from sidestep.cli.group import cli
from sidestep.errors import SidestepError
from sidestep.observe.capture.decode import looks_like_hex, messages_in

HELLO = V["V01"]
DATA = V["V18"]
DATA_LINE = 'Data: MSeq 8, MSeqAck 7, Bufs 8; 8 bytes "crossing"'


def run(*arguments: str, stdin: bytes = b"") -> Result:
    """The command as it is called."""
    return CliRunner().invoke(cli, ["sdp", "decode", *arguments], input=stdin)


def error_of(result: Result) -> SidestepError:
    """What `main` would print."""
    assert isinstance(result.exception, SidestepError), result.output
    return result.exception


# ---- hex ----


def test_a_message() -> None:
    assert run(DATA.message.hex()).stdout == DATA_LINE + "\n"
    assert run("ff 00 0008 00000018 00000008 00000007", "63726f7373696e67").exit_code == 2  # one argument
    assert run("ff 00 0008 00000018 00000008 00000007 63726f7373696e67").stdout == DATA_LINE + "\n"


def test_every_field() -> None:
    lines = run("-v", DATA.message.hex()).stdout.splitlines()
    assert lines[0] == "Data, 24 bytes"
    assert lines[-1] == '   16  payload        "crossing"        8 bytes'


def test_a_broken_message_is_shown() -> None:
    """And is no success: what is wrong, and where, is said besides."""
    result = run(DATA.message[:20].hex())
    assert result.exit_code == 1
    assert result.stdout.startswith("Data: broken (length): Len 24 in a message of 20 bytes")
    error = error_of(result)
    assert error.message == (
        "the message, line 1: Data, length: Len 24 in a message of 20 bytes: Len is the number of bytes received"
    )
    assert error.remedy


@pytest.mark.parametrize("options", [[], ["-v"], ["--json"]])
def test_broken_messages_among_others(options: list[str]) -> None:
    """All are shown, and the first broken one is named by its line."""
    whole, cut = DATA.message.hex(), DATA.message[:20].hex()
    result = run(*options, stdin=f"{whole}\n\n# cut off\n{cut[:16]}\n{cut[16:]}\n\n{whole}\n\nff00\n".encode())
    good = run(*options, stdin=whole.encode()).stdout
    assert result.exit_code == 1
    assert result.stdout.startswith(good)
    assert result.stdout.count(good) == 2
    assert error_of(result).message == (
        "standard input, line 4: Data, length: Len 24 in a message of 20 bytes: Len is the number of bytes received"
        " (and 1 more broken of 4)"
    )


@pytest.mark.parametrize("wrong", ["ff0x0g", "ff0", "caf\xe9"])
def test_what_lies_before_a_line_that_is_not_hex_is_shown(wrong: str) -> None:
    result = run(stdin=f"{DATA.message.hex()}\n\nff00\n{wrong}\n".encode("latin-1"))
    assert result.exit_code == 1
    assert result.stdout == DATA_LINE + "\n"
    assert error_of(result).message.startswith("standard input, line 4 is not hex: ")


def test_for_programs() -> None:
    found = json.loads(run("--json", DATA.message.hex()).stdout)
    assert found == {
        "schema": "sidestep.sdp.decode/1",
        "message": "Data", "mid": 255, "flags": [], "bufs": 8, "len": 24, "mseq": 8, "mseq_ack": 7, "header": {},
        "payload_len": 8, "bytes": DATA.message.hex(),
    }  # fmt: skip


def test_several_from_a_file_and_from_standard_input(tmp_path: Path) -> None:
    text = f"# two messages\n{DATA.message.hex()}\n\n{HELLO.message[:40].hex()}\n{HELLO.message[40:].hex()}\n"
    file = tmp_path / "messages.txt"
    file.write_text(text)
    for result in (run(str(file)), run(stdin=text.encode()), run("-", stdin=text.encode())):
        assert [line.split(":")[0] for line in result.stdout.splitlines()] == ["Data", "Hello"]


def told(text: str) -> list[bytes]:
    return [message for _, message in messages_in(text, "x")]


@pytest.mark.parametrize(
    "text",
    [
        "ff0102",
        "ff:01:02",
        "FF-01-02",
        "0xff, 0x01, 0x02",
        "ff 01\n02",
        "0000  ff 01 02",
        "0000  ff 01\n0002  02",
        "00000000: ff01 02                                  ...",
        "00000000  ff 01 02                                          |...|",
        "ff 01 02 # three bytes",
        "# three bytes\nff 01 02",
    ],
)
def test_ways_to_write_hex(text: str) -> None:
    assert told(text) == [b"\xff\1\2"]


def test_repeated_bytes_and_the_page_itself() -> None:
    assert told("ff 00*3 01") == [b"\xff\0\0\0\1"]
    assert list(messages_in("\n\n01\n\n\n# two\n02\n", "x")) == [(3, b"\1"), (7, b"\2")]
    assert told("") == []
    assert looks_like_hex("ff 00*3")
    assert not looks_like_hex("capture.pcap")


def test_what_is_not_hex_is_named_by_its_line(tmp_path: Path) -> None:
    file = tmp_path / "messages.txt"
    file.write_text("ff00\nff0x0g\n")
    error = error_of(run(str(file)))
    assert error.message == f"{file}, line 2 is not hex: 'ff0x0g'"
    assert error.remedy


def test_what_cannot_be_read() -> None:
    assert error_of(run("no-such-file")).message == "there is no file no-such-file, and it is not hex"
    assert "neither a capture nor hex: byte 0 is 0xff" in error_of(run(stdin=b"\xff\xfe\xfd\xfc")).message
    nothing = run(stdin=b"\n")
    assert nothing.exit_code == 1
    assert nothing.stderr == (
        "sidestep: standard input is empty\nhint: give a pcap or pcapng file, or messages in hex\n"
    )
    assert run("00" * 300).stdout.startswith("Hello: broken")  # too long for the name of a file


def test_what_is_no_file_to_read(tmp_path: Path) -> None:
    assert error_of(run(str(tmp_path))).message == f"{tmp_path} is a directory"
    assert error_of(run("")).message == "neither a file nor a message was named"
    assert error_of(run("")).remedy


def test_a_pipe_is_read(tmp_path: Path) -> None:
    """`sidestep sdp decode <(command)`"""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["sh", "-c", 'printf %s "$1" > "$2"', "sh", DATA.message.hex(), str(pipe)]):
        assert run(str(pipe)).stdout == DATA_LINE + "\n"


def test_hex_is_bounded_however_it_is_written() -> None:
    """Few characters may stand for many bytes; and what never ends is not waited for."""
    assert "characters of hex" in error_of(run(stdin=b"00*9999 " * 1000)).message
    assert "characters of hex" in error_of(run("/dev/zero")).message


# ---- captures ----


def objects(result: Result) -> list[dict[str, Any]]:
    """One a line."""
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_a_capture(tmp_path: Path) -> None:
    file = tmp_path / "talk.pcap"
    file.write_bytes(written(RECORDS))
    for result in (run(str(file)), run(stdin=written(RECORDS))):
        assert result.exit_code == 0
        lines = result.stdout.splitlines()
        assert lines[0].startswith(
            "     1     0.000000  10.0.0.1:40000 > 10.0.0.2:5001  CM REQ: service ID 0x0000000000011389"
        )
        assert lines[1].startswith("     1     0.000000  10.0.0.1:40000 > 10.0.0.2:5001  Hello: ")
        assert f"    19     0.001800  10.0.0.1:40000 > 10.0.0.2:5001  {DATA_LINE}" in lines
        assert len(lines) == len(RECORDS) + 2


def test_every_field_of_a_capture(tmp_path: Path) -> None:
    file = tmp_path / "talk.pcap"
    file.write_bytes(written(RECORDS))
    lines = run("-v", str(file)).stdout.splitlines()
    at = next(index for index, line in enumerate(lines) if line.startswith("    19 "))
    assert lines[at + 1] == "        Data, 24 bytes"
    assert lines[at + 8] == '           16  payload        "crossing"        8 bytes'


def test_a_capture_for_programs() -> None:
    found = objects(run("--json", stdin=written(RECORDS)))
    assert [one["what"] for one in found[:5]] == ["cm", "sdp", "cm", "sdp", "cm"]
    assert found[0]["text"].startswith("CM REQ: ")
    data = next(one for one in found if one["frame"] == 19)
    assert data == {
        "schema": "sidestep.sdp.decode/1",
        "frame": 19, "time_ns": 1000_001_800_000, "wire": "RoCEv2", "from": "10.0.0.1:40000", "to": "10.0.0.2:5001",
        "connection": 1, "side": "connecting", "what": "sdp", "solicited": False, "message": "Data", "mid": 255,
        "flags": [], "bufs": 8, "len": 24, "mseq": 8, "mseq_ack": 7, "header": {}, "payload_len": 8,
        "bytes": DATA.message.hex(),
    }  # fmt: skip
    assert [one["bytes"] for one in found if one["what"] == "sdp"] == [
        HELLO.message.hex(), V["V02"].message.hex(), *(bytes(one.data).hex() for one in RECORDS[3:-2])
    ]  # fmt: skip


def test_a_capture_that_is_cut_off() -> None:
    """What is there is shown first; then the error names file, frame and remedy."""
    result = run(stdin=written(RECORDS)[:-30])
    assert len(result.stdout.splitlines()) == len(RECORDS) + 1  # all but the last
    error = error_of(result)
    assert error.message == f"standard input, frame {len(RECORDS)}: the file ends after 292 of 322 bytes"
    assert error.remedy == "everything before it has been read; capture again for the rest"


def test_a_capture_without_sdp() -> None:
    nothing = run(stdin=pcap(FRAMES_OF_WHOLE[:0]))
    assert nothing.exit_code == 1
    assert nothing.stderr.startswith("sidestep: no SDP in the 0 frames of standard input\nhint: a capture must hold")
    strange = run(stdin=pcap(FRAMES_OF_WHOLE, 147))
    assert "hint: link types 147 cannot be read" in strange.stderr


@pytest.mark.slow
@pytest.mark.parametrize("what", [["decode", DATA.message.hex()], ["simulate"]])
def test_output_that_has_no_room(what: list[str]) -> None:
    command = [sys.executable, "-m", "sidestep", "sdp", *what]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == (
        "sidestep: not all of it could be written: No space left on device\nhint: make room, or write elsewhere\n"
    )


@pytest.mark.slow
def test_as_a_program(tmp_path: Path) -> None:
    """Exit codes and streams of the real command."""
    command = [sys.executable, "-m", "sidestep", "sdp", "decode"]
    environment = {**os.environ, "NO_COLOR": "1"}
    done = subprocess.run([*command, DATA.message.hex()], capture_output=True, text=True, env=environment, check=True)
    assert (done.stdout, done.stderr) == (DATA_LINE + "\n", "")
    wrong = subprocess.run([*command, "nothing-there"], capture_output=True, text=True, env=environment, check=False)
    assert (wrong.returncode, wrong.stdout) == (1, "")
    cut = subprocess.run([*command, "ff00"], capture_output=True, text=True, env=environment, check=False)
    assert cut.returncode == 1
    assert cut.stdout.startswith("no message: broken")
    assert cut.stderr.startswith("sidestep: the message, line 1: no message, ")
    assert wrong.stderr == (
        "sidestep: there is no file nothing-there, and it is not hex\nhint: give a file, or a message in hex\n"
    )
