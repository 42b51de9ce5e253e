"""Bytes from pipe to pipe through two programs: fed and collected by threads, and counted by path."""

from __future__ import annotations

import threading

from stage import DEADLINE_S, Program, Stage, sha256

NUDGE_SIZE = 20_000


class Feeder:
    """Writes `data` to a program: a nudge at a time, then all but the last byte, then that byte and the end.

    The held-back byte keeps the connection alive for as long as the test looks at it.
    """

    def __init__(self, program: Program, data: bytes) -> None:
        self.program, self.data = program, data
        self.position = 0
        self._error: OSError | None = None
        self._thread: threading.Thread | None = None

    @property
    def left(self) -> int:
        """Bytes not yet fed."""
        return len(self.data) - self.position

    def nudge(self) -> None:
        """Feed a little."""
        self._feed(min(self.position + NUDGE_SIZE, len(self.data) - 1))

    def start(self) -> None:
        """Feed all but the last byte, in the background."""
        self._thread = threading.Thread(target=self._feed_in_background, daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait for what `start` began."""
        assert self._thread is not None
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive(), self.program.complaint("does not take its input")
        if self._error:
            raise AssertionError(self.program.complaint("left while it was fed")) from self._error

    def feed_by_ring(self, stage: Stage, port: int) -> None:
        """Feed all, of which the most has to go by ring."""
        self.nudge()
        stage.check_path(port, nudge=self.nudge)
        ring_bytes_min = self.left - 1
        self.start()
        self.join()
        stage.check_path(port, ring_bytes_min=ring_bytes_min)
        self.finish()

    def finish(self) -> None:
        """Feed the last byte and the end."""
        self._feed(len(self.data))
        self.program.stdin.close()

    def _feed_in_background(self) -> None:
        try:
            self._feed(len(self.data) - 1)
        except OSError as error:
            self._error = error

    def _feed(self, end: int) -> None:
        piece, self.position = self.data[self.position : end], end
        self.program.stdin.write(piece)
        self.program.stdin.flush()


class Collector(threading.Thread):
    """Reads a program's output to its end."""

    def __init__(self, program: Program) -> None:
        super().__init__(daemon=True)
        self.program = program
        self.data = bytearray()
        self._error: AssertionError | None = None
        self.start()

    def run(self) -> None:
        """Read."""
        try:
            while piece := self.program.read(1 << 20):
                self.data += piece
        except AssertionError as error:
            self._error = error

    def checksum(self) -> str:
        """Wait for the end; the checksum of all that came."""
        self.join()
        if self._error:
            raise self._error
        return sha256(self.data)
