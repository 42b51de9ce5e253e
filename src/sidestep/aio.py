"""`open_connection` and `start_server` of asyncio, whose connections go through shared memory where both ends can.

Without `sidestep.install()` only connections made by these two are taken over. They work with asyncio's own loop at
any time, and with others, such as uvloop's, if the loop was made after the shim was loaded: call `install()` first.
"""

from __future__ import annotations

import asyncio
import ssl as ssl_module
from collections.abc import Awaitable, Callable
from socket import SOCK_STREAM
from typing import Any

from sidestep import embed
from sidestep.socket import socket

__all__ = ["open_connection", "start_server"]

STREAM_LIMIT = 64 << 10  # bytes that a StreamReader buffers, as in asyncio


async def open_connection(
    host: str | None = None,
    port: int | str | None = None,
    *,
    limit: int = STREAM_LIMIT,
    ssl: ssl_module.SSLContext | bool | None = None,
    family: int = 0,
    proto: int = 0,
    flags: int = 0,
    local_addr: tuple[str, int] | None = None,
    server_hostname: str | None = None,
    **options: Any,
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connects to a host; as `asyncio.open_connection`, but the addresses of the host are tried one after another.

    `options` go to `asyncio.open_connection`, such as `ssl_handshake_timeout` (seconds) or `sock`.

    Raises:
        OSError: No address could be connected to; the first error.
    """
    embed.adopt_running_loop()
    if host is not None or port is not None:
        options["sock"] = await _connect(host, port, family, proto, flags, local_addr)
    if ssl and server_hostname is None:
        server_hostname = host
    try:
        return await asyncio.open_connection(limit=limit, ssl=ssl, server_hostname=server_hostname, **options)
    except BaseException:
        if host is not None or port is not None:
            options["sock"].close()
        raise


async def start_server(
    client_connected_cb: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None] | None],
    host: str | list[str] | None = None,
    port: int | str | None = None,
    *,
    limit: int = STREAM_LIMIT,
    start_serving: bool = True,
    **options: Any,
) -> asyncio.Server:
    """Serves connections; as `asyncio.start_server`, to which `options` go."""
    embed.adopt_running_loop()
    server: asyncio.Server = await asyncio.start_server(
        client_connected_cb, host, port, limit=limit, start_serving=False, **options
    )
    for listener in server.sockets:
        embed.adopt(listener.fileno())
    if start_serving:
        await server.start_serving()
    return server


async def _connect(
    host: str | None, port: int | str | None, family: int, proto: int, flags: int, local_addr: tuple[str, int] | None
) -> socket:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, family=family, type=SOCK_STREAM, proto=proto, flags=flags)
    failed: OSError | None = None
    for kind, type_, number, _, address in found:
        sock = socket(kind, type_, number)
        try:
            sock.setblocking(False)
            if local_addr is not None:
                sock.bind(local_addr)
            await loop.sock_connect(sock, address)
        except OSError as error:
            sock.close()
            failed = failed or error
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise failed or OSError(f"{host} has no address")
