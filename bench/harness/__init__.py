"""The benchmark runner's parts: machine, worlds, programs, rows and the report."""
