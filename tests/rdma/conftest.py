"""Failures of what several tests share are told in full, as those of the tests are."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("random_verbs")
