"""Brings COUNT mails of SIZE bytes, fetches them and compares.

usage: imap_client.py PORT imap|imaps COUNT SIZE
Prints "in" when it is logged in, and "same". Before the first mail and at the end it stays: each line on standard input
makes it ask for nothing, which it answers with "nudged", until one says "go on", or the end.
"""

from __future__ import annotations

import imaplib
import random
import ssl
import sys


def linger(imap: imaplib.IMAP4) -> None:
    for line in sys.stdin:
        if line == "go on\n":
            return
        imap.noop()
        print("nudged", flush=True)


def mail(number: int, size: int) -> bytes:
    text = random.Random(number).randbytes(size * 36 // 74).hex()
    lines = [text[at : at + 72] for at in range(0, len(text), 72)]
    return "\r\n".join(["Subject: a", "", *lines, ""]).encode()


def main() -> None:
    port, protocol, count, size = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    if protocol == "imaps":
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        imap: imaplib.IMAP4 = imaplib.IMAP4_SSL("127.0.0.1", port, ssl_context=context)
    else:
        imap = imaplib.IMAP4("127.0.0.1", port)
    imap.login("somebody", "x")
    print("in", flush=True)
    linger(imap)
    for number in range(count):
        assert imap.append("INBOX", "", "", mail(number, size))[0] == "OK"
    imap.select("INBOX")
    for number in range(count):
        (found, *_) = imap.fetch(str(number + 1), "(BODY.PEEK[])")[1]
        assert isinstance(found, tuple)
        assert found[1] == mail(number, size), number
    print("same", flush=True)
    linger(imap)
    imap.logout()


main()
