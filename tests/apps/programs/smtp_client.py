"""Sends each of the files as a mail.

usage: smtp_client.py PORT FILE...
Prints "in" when it is connected, and "sent". After each it stays: each line on standard input makes it ask for nothing,
which it answers with "nudged", after "in" until one says "go on", after "sent" to the end.
"""

from __future__ import annotations

import smtplib
import sys
from pathlib import Path


def linger(smtp: smtplib.SMTP) -> None:
    for line in sys.stdin:
        if line == "go on\n":
            return
        smtp.noop()
        print("nudged", flush=True)


def main() -> None:
    with smtplib.SMTP("127.0.0.1", int(sys.argv[1])) as smtp:
        smtp.ehlo("here")
        print("in", flush=True)
        linger(smtp)
        for name in sys.argv[2:]:
            smtp.sendmail("a@here", ["somebody@here"], Path(name).read_text())
        print("sent", flush=True)
        linger(smtp)


main()
