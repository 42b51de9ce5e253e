"""Parts of `bench/iwarp.py`: the method of measuring, and the ends that are measured by it."""
