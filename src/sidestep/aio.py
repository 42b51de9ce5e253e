"""`open_connection` and `start_server` of asyncio, whose connections go through shared memory where both ends can.

Without `sidestep.install()` only connections made by these two are taken over. They work with asyncio's own loop at any
time. Other loops, such as uvloop's, must be made after the shim was loaded: call `install()` first.

`EventLoop` is asyncio's own loop, of which every TCP connection is taken over, also those that libraries make on it.

With `protocol="sdp"` the two use SDP over an RDMA device in this very process; see `sidestep.api.streams`.
"""

from __future__ import annotations

import asyncio
import ssl as ssl_module
from collections.abc import Awaitable, Callable
from selectors import BaseSelector
from socket import SOCK_STREAM
from socket import socket as StandardSocket  # noqa: N812 - sidestep's has the name
from typing import TYPE_CHECKING, Any, Literal, overload

from sidestep import embed, limits
from sidestep.errors import Misuse
from sidestep.socket import socket

if TYPE_CHECKING:
    from sidestep.api.streams import SdpReader, SdpServer, SdpWriter

__all__ = ["EventLoop", "open_connection", "start_server"]

STREAM_LIMIT = 64 << 10  # bytes that a StreamReader buffers, as in asyncio


class EventLoop(asyncio.SelectorEventLoop):
    """asyncio's loop, whose TCP connections go through shared memory where both ends can.

    For `asyncio.Runner(loop_factory=sidestep.EventLoop)`. Sockets that the loop neither connects nor accepts stay as
    they are. Where the shim cannot work there is a RuntimeWarning, once, and the loop is asyncio's.
    """

    def __init__(self, selector: BaseSelector | None = None) -> None:
        """`selector` is as for asyncio; one that is older than the shim is not seen to wait, so leave it out."""
        embed.load()  # no loop yet has made its end of the wait
        super().__init__(selector)

    async def sock_connect(self, sock: StandardSocket, address: Any) -> None:
        """Connects as asyncio's loop does; `create_connection` connects by it as well."""
        embed.adopt(sock.fileno())
        await super().sock_connect(sock, address)

    async def sock_accept(self, sock: StandardSocket) -> tuple[StandardSocket, Any]:
        """Accepts as asyncio's loop does."""
        embed.adopt(sock.fileno())
        return await super().sock_accept(sock)

    async def create_server(self, *args: Any, start_serving: bool = True, **options: Any) -> asyncio.Server:
        """Makes a server as asyncio's loop does."""
        server: asyncio.Server = await super().create_server(*args, start_serving=False, **options)
        await _serve(server, start_serving)
        return server


@overload
async def open_connection(
    host: str | None = ...,
    port: int | str | None = ...,
    *,
    limit: int = ...,
    ssl: ssl_module.SSLContext | bool | None = ...,
    family: int = ...,
    proto: int = ...,
    flags: int = ...,
    local_addr: tuple[str, int] | None = ...,
    server_hostname: str | None = ...,
    protocol: Literal["tcp"] = ...,
    **options: Any,
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]: ...


@overload
async def open_connection(
    host: str,
    port: int,
    *,
    family: int = ...,
    local_addr: tuple[str, int] | None = ...,
    protocol: Literal["sdp"],
    rdma_port: int | None = ...,
) -> tuple[SdpReader, SdpWriter]: ...


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
    protocol: Literal["tcp", "sdp"] = "tcp",
    rdma_port: int | None = None,
    **options: Any,
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | tuple[SdpReader, SdpWriter]:
    """Connects to a host; as `asyncio.open_connection`, but the addresses of the host are tried one after another.

    `options` go to `asyncio.open_connection`, such as `ssl_handshake_timeout` (seconds) or `sock`. With
    `protocol="sdp"` it gives `SdpReader` and `SdpWriter`; `rdma_port` spares the question to the port mapper.

    Raises:
        OSError: No address could be connected to; the first error.
    """
    if protocol != "tcp":
        if not isinstance(host, str) or not isinstance(port, int) or ssl or options:
            raise Misuse("SDP takes a host, a number and few options", remedy="see docs/guides/python-api.md")
        from sidestep.api import streams

        return await streams.open_connection(host, port, local_addr=local_addr, family=family, rdma_port=rdma_port)
    if rdma_port is not None:
        raise Misuse("an RDMA port without SDP", remedy='protocol="sdp"')
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


@overload
async def start_server(
    client_connected_cb: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None] | None],
    host: str | list[str] | None = ...,
    port: int | str | None = ...,
    *,
    limit: int = ...,
    start_serving: bool = ...,
    protocol: Literal["tcp"] = ...,
    **options: Any,
) -> asyncio.Server: ...


@overload
async def start_server(
    client_connected_cb: Callable[[SdpReader, SdpWriter], Awaitable[None] | None],
    host: str | list[str] | None = ...,
    port: int = ...,
    *,
    family: int = ...,
    backlog: int = ...,
    protocol: Literal["sdp"],
) -> SdpServer: ...


async def start_server(
    client_connected_cb: Callable[[Any, Any], Awaitable[None] | None],
    host: str | list[str] | None = None,
    port: int | str | None = None,
    *,
    limit: int = STREAM_LIMIT,
    start_serving: bool = True,
    protocol: Literal["tcp", "sdp"] = "tcp",
    **options: Any,
) -> asyncio.Server | SdpServer:
    """Serves connections; as `asyncio.start_server`, to which `options` go.

    With `protocol="sdp"` it calls back with `SdpReader` and `SdpWriter`; options are then `family` and `backlog`.
    """
    if protocol != "tcp":
        family, backlog = options.pop("family", 0), options.pop("backlog", limits.RDMA_BACKLOG_DEFAULT)
        if not isinstance(port, int | None) or not start_serving or options:
            raise Misuse("SDP takes a host, a number and few options", remedy="see docs/guides/python-api.md")
        from sidestep.api import streams

        return await streams.start_server(client_connected_cb, host, port or 0, family=family, backlog=backlog)
    embed.adopt_running_loop()
    server: asyncio.Server = await asyncio.start_server(
        client_connected_cb, host, port, limit=limit, start_serving=False, **options
    )
    await _serve(server, start_serving)
    return server


async def _serve(server: asyncio.Server, start_serving: bool) -> None:
    for listener in server.sockets:
        embed.adopt(listener.fileno())
    if start_serving:
        await server.start_serving()


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
