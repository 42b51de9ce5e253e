"""Runs a module of tests, such as test.test_socket, and writes each test's outcome down as soon as it is known.

usage: recorder.py FD FIRST MODULE RESOURCES TIMEOUT_S EXCLUDED...

FIRST is the index of the first test to run, so that a run can go on after a test that killed or hung it. RESOURCES is a
comma-separated list as of `python -m test -u`; EXCLUDED are patterns of test ids. Output on file descriptor FD, a JSON
list a line: ["start", index, id], ["end", id, outcome, detail], ["done", environment altered].
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import sys
import unittest
import warnings
from collections.abc import Iterator
from fnmatch import fnmatchcase
from types import TracebackType
from typing import Any, Final

from test import support  # the interpreter's own test package

REPORT_FD: Final = 3
Failure = tuple[type[BaseException], BaseException, TracebackType] | tuple[None, None, None]


def say(*words: object) -> None:
    """Write one line."""
    os.write(REPORT_FD, json.dumps(words).encode() + b"\n")


class Recorder(unittest.TestResult):
    """Says what became of each test; the worst of a test's subtests is the test's."""

    def __init__(self, first: int, timeout_s: float) -> None:
        super().__init__()
        self.index = first
        self.timeout_s = timeout_s
        self.verdict: tuple[str, str] | None = None

    def startTest(self, test: unittest.TestCase) -> None:  # noqa: N802
        super().startTest(test)
        self.verdict = None
        say("start", self.index, test.id())
        self.index += 1
        faulthandler.dump_traceback_later(self.timeout_s, exit=True)

    def stopTest(self, test: unittest.TestCase) -> None:  # noqa: N802
        super().stopTest(test)
        outcome, detail = self.verdict or ("ok", "")
        say("end", test.id(), outcome, detail)

    def note(self, test: unittest.TestCase, outcome: str, detail: str) -> None:
        """Keep the first failure; a fixture that fails or skips has no start and is reported at once."""
        if not isinstance(test, unittest.TestCase):
            say("end", test.id(), outcome, detail)
        elif self.verdict is None or self.verdict[0] == "skip":
            self.verdict = outcome, detail

    def failed(self, test: unittest.TestCase, failure: Failure) -> None:
        """An assertion failed or something else was raised: the traceback is the detail."""
        self.note(test, "fail", self._exc_info_to_string(failure, test))  # type: ignore[attr-defined]

    def addError(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802
        self.failed(test, err)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802
        self.failed(test, err)

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any) -> None:  # noqa: N802
        if err is not None:
            self.failed(test, err)

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:  # noqa: N802
        self.note(test, "skip", reason)

    def addExpectedFailure(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802
        self.note(test, "expected failure", "")

    def addUnexpectedSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802
        self.note(test, "unexpected success", "")


def flatten(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    """The tests in the order in which they run."""
    for item in suite:
        if isinstance(item, unittest.TestSuite):
            yield from flatten(item)
        else:
            yield item


def main() -> None:
    """Run the tests from FIRST on."""
    writer, first, module, resources, timeout_s, *excluded = sys.argv[1:]
    if int(writer) != REPORT_FD:  # low, where it is in the way of no test that counts on high descriptors being free
        os.dup2(int(writer), REPORT_FD, inheritable=False)
        os.close(int(writer))
    support.use_resources = [name for name in resources.split(",") if name]
    support.verbose = 0
    faulthandler.enable()
    warnings.simplefilter("default")
    tests = [
        test
        for test in flatten(unittest.defaultTestLoader.loadTestsFromName(module))
        if not any(fnmatchcase(test.id(), pattern) for pattern in excluded)
    ]
    suite = unittest.TestSuite(tests[int(first) :])
    del tests  # the suite lets go of each test after it, and so must we: some collect garbage hundreds of times
    gc.freeze()
    suite.run(Recorder(int(first), float(timeout_s)))
    faulthandler.cancel_dump_traceback_later()
    say("done", support.environment_altered)


if __name__ == "__main__":
    main()
