"""Which mechanism carries which bytes: the only part of SDP that is a matter of taste.

The standard leaves the choice to each peer, around a Bcopy threshold for each direction. A strategy is asked seldom:
never for a send that is not longer than `bcopy_max`. docs/internals/sdp.md shows the measurement behind the defaults.
"""

from __future__ import annotations

from dataclasses import dataclass

from sidestep.sdp.wire import Mode


@dataclass(slots=True)
class Strategy:
    """The default. Sizes are bytes; a size of None means never."""

    bcopy_max: int = 256 << 10  # a send of up to this many bytes goes by Bcopy
    read_min: int = 128 << 10  # room that makes an RDMA Read worth its round trip; less and the source is told SendSm
    sink_min: int | None = 256 << 10  # a receive of at least this many bytes is advertised, in Pipelined mode
    advert_max: int = 16 << 20  # bytes of one advertisement
    adverts_in_flight: int = 8  # own advertisements outstanding, of both kinds; the peer's MaxAdverts bounds it as well
    payload: int = 64  # bytes that ride with a SrcAvail in Combined mode
    transactions: bool = True
    pipelined: bool = True  # may ask for Pipelined mode
    refusals: int = 4  # SendSm in a row until Read Zcopy rests
    rest: int = 64  # sends for which it then rests

    _refused: int = 0
    _resting: int = 0

    def wants_zcopy(self, length: int) -> bool:
        """Whether a send of more than `bcopy_max` bytes should be advertised, or written."""
        if self._resting:
            self._resting -= 1
            return False
        return length > self.bcopy_max

    def wants_read(self, offered: int, room: int) -> bool:
        """Whether `room` bytes of a receive deserve an RDMA Read from an advertisement with `offered` bytes left."""
        return room >= self.read_min or room >= offered

    def wants_sink_avail(self, length: int) -> bool:
        """Whether a receive of that length should be advertised."""
        return self.sink_min is not None and length >= self.sink_min

    def wants_pipelined(self, receive_length: int) -> bool:
        """Whether the sink would like Pipelined mode, seeing the receive that is waiting: REQ_PIPE."""
        return self.pipelined and self.wants_sink_avail(receive_length)

    def send_mode(self, mode: Mode, queued: int, asked: bool) -> Mode:
        """The mode for sending, where `queued` sends wait and the other end's hint is `asked`."""
        if mode is Mode.COMBINED and self.pipelined and (asked or queued >= 2) and not self._resting:
            return Mode.PIPELINED
        return mode

    def saw_refusal(self) -> None:
        """The other end answered an advertisement by SendSm."""
        self._refused += 1
        if self._refused >= self.refusals:
            self._refused, self._resting = 0, self.rest

    def saw_use(self) -> None:
        """The other end made use of an advertisement."""
        self._refused = 0


def bcopy_only() -> Strategy:
    """Everything through private buffers: what every peer understands."""
    never = 1 << 62
    return Strategy(bcopy_max=never, read_min=never, sink_min=None, transactions=False, pipelined=False)
