"""Runs the benchmarks: `python bench/run.py --help`."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    try:
        from harness.cli import main
    except ModuleNotFoundError as missing:
        sys.exit(f"{missing}; install sidestep with pip, or use 'make bench' in a checkout")
    main()
