"""usage: ftp_client.py PORT FILE active|passive

Fetches /FILE, slowly until standard input has a line. Puts it as /up/copy, fetches that, and compares.
Prints what came first.
"""

from __future__ import annotations

import ftplib
import io
import select
import sys
import time


def main() -> None:
    port, name, mode = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    got = bytearray()

    def slowly(piece: bytes) -> None:
        got.extend(piece)
        if not select.select([sys.stdin], [], [], 0)[0]:
            time.sleep(0.005)  # between two reads of a transfer that the test looks at

    with ftplib.FTP() as ftp:
        ftp.connect("127.0.0.1", port)
        ftp.login()
        ftp.set_pasv(mode == "passive")
        ftp.retrbinary(f"RETR {name}", slowly)
        ftp.storbinary("STOR up/copy", io.BytesIO(got))
        again = bytearray()
        ftp.retrbinary("RETR up/copy", again.extend)
    sys.stdout.buffer.write(got)
    sys.stdout.buffer.flush()
    assert again == got, (len(again), len(got))


main()
