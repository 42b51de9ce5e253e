"""The provider as the service manager starts it, as far as a test can: socket handed over, own user, no capabilities.

usage: provider.py UID DESCRIPTORS ARGUMENT... with the listening socket as standard input

All is imported before the privileges go, because the interpreter may lie under a home directory closed to that user.
"""

from __future__ import annotations

import codecs
import importlib
import os
import resource
import sys

from sidestep.provider import __main__ as provider

LATER = ("sidestep.switch.local", "encodings.idna", "linecache")


def prepare() -> None:
    """Imports what the provider would import when it needs it."""
    for name in LATER:
        importlib.import_module(name)
    codecs.lookup("ascii")


def main() -> int:
    """Serves until it is stopped."""
    uid, descriptors, *arguments = sys.argv[1:]
    prepare()
    os.dup2(0, 3)
    os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1"}
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(descriptors), int(descriptors)))
    os.setgroups([])
    os.setgid(int(uid))
    os.setuid(int(uid))
    sys.argv[1:] = arguments
    return provider.main()


if __name__ == "__main__":
    sys.exit(main())
