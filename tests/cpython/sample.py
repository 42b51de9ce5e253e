"""Tests with every outcome there is, for test_suite.py. Not collected by pytest."""

from __future__ import annotations

import os
import time
import unittest


class Sample(unittest.TestCase):
    def test_a_ok(self) -> None:
        assert True

    def test_b_fail(self) -> None:
        self.fail("as asked")

    def test_c_crash(self) -> None:
        os.abort()

    @unittest.skip("as asked")
    def test_d_skip(self) -> None:
        self.fail("not reached")

    def test_e_hang(self) -> None:
        time.sleep(3600)

    def test_f_subtests(self) -> None:
        for number in range(3):
            with self.subTest(number=number):
                assert number != 1

    @unittest.expectedFailure
    def test_g_expected(self) -> None:
        self.fail("as asked")

    def test_h_ok(self) -> None:
        assert True

    def test_i_excluded(self) -> None:
        self.fail("not reached")


class Broken(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        raise OSError("as asked")

    def test_ok(self) -> None:
        assert True
