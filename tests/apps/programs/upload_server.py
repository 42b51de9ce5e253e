"""An HTTP/1.1 server that takes PUT bodies, with a length or chunked, and answers with their size and SHA-256.

usage: upload_server.py PORT
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase


def chunks(body: BufferedIOBase) -> Iterator[bytes]:
    """The pieces of a chunked body."""
    while size := int(body.readline(), 16):
        yield body.read(size)
        assert body.readline() == b"\r\n"
    assert body.readline() == b"\r\n"


class Handler(BaseHTTPRequestHandler):
    """Answers PUT."""

    protocol_version = "HTTP/1.1"

    def do_PUT(self) -> None:
        checksum, size = hashlib.sha256(), 0
        if self.headers.get("Transfer-Encoding") == "chunked":
            pieces = chunks(self.rfile)
        else:
            pieces = iter([self.rfile.read(int(self.headers["Content-Length"]))])
        for piece in pieces:
            checksum.update(piece)
            size += len(piece)
        answer = json.dumps([size, checksum.hexdigest()]).encode() + b"\n"
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
