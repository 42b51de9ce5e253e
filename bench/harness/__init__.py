"""The benchmark runner's parts: machine, worlds, programs, rows and the report."""

from pathlib import Path

import sidestep.demo

sidestep.demo.__path__.insert(0, str(Path(__file__).parents[2] / "src/sidestep/demo"))  # of this checkout, as rows are
