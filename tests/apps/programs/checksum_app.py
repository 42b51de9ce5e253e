"""A WSGI application: answers a POST with size, SHA-256 and worker pid; a GET of /N with N reproducible bytes."""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Callable, Iterable
from typing import Any


def app(environ: dict[str, Any], start_response: Callable[[str, list[tuple[str, str]]], object]) -> Iterable[bytes]:
    """The application."""
    if environ["REQUEST_METHOD"] == "POST":
        checksum, size = hashlib.sha256(), 0
        while piece := environ["wsgi.input"].read(65536):
            checksum.update(piece)
            size += len(piece)
        body = json.dumps([size, checksum.hexdigest(), os.getpid()]).encode()
    else:
        size = int(environ["PATH_INFO"].strip("/"))
        body = random.Random(size).randbytes(size)
    start_response("200 OK", [("Content-Length", str(len(body))), ("Content-Type", "application/octet-stream")])
    return [body[start : start + 100_000] for start in range(0, len(body), 100_000)]
