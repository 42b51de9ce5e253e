"""Stands on the wire between two providers, and judges what each says, by docs/wire/sdp.md §8, §9 and by the link.

It is a proxy for one TCP connection of iWARP: bytes pass as they are, in portions that it chooses. It takes each
message apart with nothing of sidestep's own. What a message says about what its sender had received makes its sender's
credit known exactly, whatever is under way.
"""

from __future__ import annotations

import random
import socket
from dataclasses import dataclass, field
from struct import Struct
from typing import Final

_BSDH: Final = Struct(">BBHIII")
_WORD: Final = Struct(">B7xQ")
_UNTAGGED: Final = Struct(">BBIIII")
_MPA_LEN: Final = 20
_SENDS: Final = (0x43, 0x45)  # Send, and with a solicited event
_DATA, _CH_RCV_BUF_ACK = 0xFF, 0x0C
DATA, READ, ATTACHED = 4, 5, 1
_TAKES: Final = 1 << 18  # bytes that lie with the proxy before it reads no more


@dataclass(frozen=True, slots=True)
class Said:
    """One message, and what its sender has said with it and all before."""

    bufs: int
    ack: int
    size: int  # bytes of its private buffers
    data: int = 0  # bytes of its application's stream
    data_left: int = 0  # that a word of DATA has still to bring
    read: int = 0  # bytes that its application has read
    payloads: int = 0  # messages with payload
    length: int = 0  # bytes of all messages


@dataclass(slots=True)
class Half:
    """What one end has said."""

    said: list[Said]  # by sequence number
    stream: bytearray = field(default_factory=bytearray)  # of its application
    words: list[tuple[int, int]] = field(default_factory=list)  # but DATA and READ
    window: int = 0  # what its application can leave unread
    _raw: bytearray = field(default_factory=bytearray)
    _message: bytearray = field(default_factory=bytearray)
    _word: bytearray = field(default_factory=bytearray)
    _started: bool = False

    def feed(self, piece: bytes) -> list[bytes]:
        """The messages that are whole with these bytes."""
        found, raw = [], self._raw
        raw += piece
        at = 0
        if not self._started:
            if len(raw) < _MPA_LEN or len(raw) < (at := _MPA_LEN + int.from_bytes(raw[18:20])):
                return []
            self._started = True
        while len(raw) - at >= 2:
            length = int.from_bytes(raw[at : at + 2])
            end = at + 2 + length + -(2 + length) % 4 + 4
            if len(raw) < end:
                break
            control, rdmap, _, queue, _, offset = _UNTAGGED.unpack_from(raw, at + 2)
            if not control & 0x80 and rdmap in _SENDS and queue == 0:
                assert offset == len(self._message)
                self._message += raw[at + 20 : at + 2 + length]
                if control & 0x40:
                    found.append(bytes(self._message))
                    self._message.clear()
            at = end
        del raw[:at]
        return found

    def take_payload(self, payload: bytes, left: int, read: int) -> tuple[int, int]:
        """The words and the data of a message: what of DATA is still to come, and what was read."""
        at = 0
        while at < len(payload):
            if left:
                part = payload[at : at + left]
                self.stream += part
                left -= len(part)
                at += len(part)
                continue
            part = payload[at : at + _WORD.size - len(self._word)]
            self._word += part
            at += len(part)
            if len(self._word) < _WORD.size:
                break
            number, count = _WORD.unpack(self._word)
            self._word.clear()
            if number == DATA:
                assert count > 0
                left = count
            elif number == READ:
                assert count > read, f"{count} bytes read, after {read}"
                read = count
            else:
                self.words.append((number, count))
                if number == ATTACHED:
                    self.window = count & 0xFFFFFFFF
        return left, read


class Judge:
    """Of both directions."""

    def __init__(self, bufs: int, size: int) -> None:
        self.halves = Half([Said(bufs, 0, size)]), Half([Said(bufs, 0, size)])
        self.messages = 0

    def feed(self, index: int, piece: bytes) -> None:
        for message in self.halves[index].feed(piece):
            self._take(self.halves[index], self.halves[1 - index], message)

    def _take(self, half: Half, other: Half, message: bytes) -> None:
        mid, _flags, bufs, length, mseq, ack = _BSDH.unpack_from(message)
        assert length == len(message)
        before = half.said[-1]
        if mseq == 0:
            assert bufs == before.bufs  # HelloAck
            return
        self.messages += 1
        assert mseq == len(half.said), f"message {mseq} after {len(half.said) - 1}"
        assert before.ack <= ack < len(other.said), f"acknowledges {ack}, after {before.ack}, of {len(other.said) - 1}"
        known = other.said[ack]
        assert length <= known.size, f"{length} bytes for a buffer of {known.size}"
        credit = known.bufs - (mseq - 1 - known.ack)
        payload = message[_BSDH.size :] if mid == _DATA else b""
        if payload:
            assert credit >= 3, f"payload with a credit of {credit}"
        else:
            view = before.bufs - (ack - before.ack)
            assert credit >= 2 or (credit == 1 and bufs > view), f"message {mid} with a credit of {credit}"
        left, read = half.take_payload(payload, before.data_left, before.read)
        size = int.from_bytes(message[16:20]) if mid == _CH_RCV_BUF_ACK else before.size
        half.said.append(
            Said(
                bufs,
                ack,
                size,
                len(half.stream),
                left,
                read,
                before.payloads + bool(payload),
                before.length + length,
            )
        )
        assert read <= known.data, f"{read} bytes read, of {known.data}"
        if payload:  # bytes that are there, and those that are announced, behind what it knows to be read
            assert len(half.stream) + left - known.read <= other.window or left + len(half.stream) == before.data


class Between:
    """The proxy. `pump` moves bytes; with `dice` they come in portions, and sometimes not at once."""

    def __init__(self, judge: Judge, address: str, target: tuple[str, int], dice: random.Random | None) -> None:
        self.judge, self._target, self._dice = judge, target, dice
        self._listener = socket.create_server((address, target[1]))
        self._listener.setblocking(False)
        self._ends: list[socket.socket] = []
        self._held = bytearray(), bytearray()  # by who sent it
        self._over = [False, False]

    def close(self) -> None:
        for each in (self._listener, *self._ends):
            each.close()

    def pump(self) -> bool:
        """Whether anything moved, or is held back."""
        if not self._ends:
            try:
                first, _ = self._listener.accept()
            except BlockingIOError:
                return False
            self._ends = [first, socket.create_connection(self._target)]
            for each in self._ends:
                each.setblocking(False)
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        moved = self._move(0)
        return self._move(1) or moved

    def _move(self, index: int) -> bool:
        source, target, held, dice = self._ends[index], self._ends[1 - index], self._held[index], self._dice
        if not self._over[index] and len(held) < _TAKES:
            try:
                piece = source.recv(1 << 18)
            except BlockingIOError:
                piece = None
            except OSError:
                piece = b""
            if piece:
                self.judge.feed(index, piece)
                held += piece
            elif piece is not None:
                self._over[index] = True
                if not held:
                    self._end(target)
                return True
        if not held:
            return False
        count = len(held)
        if dice is not None and (kind := dice.random()) < 0.5:
            if kind < 0.2:
                return True  # later
            count = min(count, dice.choice((1, 20, 700, 5000)))
        try:
            sent = target.send(held[:count])
        except BlockingIOError:
            return True
        except OSError:
            sent = len(held)
        del held[:sent]
        if self._over[index] and not held:
            self._end(target)
        return True

    @staticmethod
    def _end(target: socket.socket) -> None:
        try:
            target.shutdown(socket.SHUT_WR)
        except OSError:
            target.close()
