"""Native parts: the record layout shared with C, and, beside this file once built, ``libsidestep.so``."""
