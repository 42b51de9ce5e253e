"""Runs tests with another build of an extension: EXTENSION.so MODULE, and what pytest is told."""

from __future__ import annotations

import importlib.util
import sys

import pytest

path, name, *arguments = sys.argv[1:]
spec = importlib.util.spec_from_file_location(name, path)
assert spec is not None
assert spec.loader is not None
module = importlib.util.module_from_spec(spec)


class Watched:
    """The sanitizer takes its time; and pytest wants to be the first to import hypothesis, and a plugin of its own."""

    @staticmethod
    def pytest_configure() -> None:
        assert spec is not None
        assert spec.loader is not None
        assert name not in sys.modules
        sys.modules[name] = module
        spec.loader.exec_module(module)
        from hypothesis import settings

        settings.register_profile("sanitized", max_examples=25, deadline=None)
        settings.load_profile("sanitized")


status = pytest.main(["-q", "-p", "no:cacheprovider", *arguments], [Watched()])
assert sys.modules[name] is module
sys.exit(status)
