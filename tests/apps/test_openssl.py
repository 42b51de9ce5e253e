"""OpenSSL's s_server and s_client: TLS in user space over a promoted connection."""

from __future__ import annotations

import subprocess
from pathlib import Path

import needed
import pytest
from flow import Collector, Feeder
from stage import Stage, payload, sha256

SIZE = 8_000_000
DOWNLOAD_SIZE = 25_000_000  # more than the kernel's buffers could swallow at once


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A key and a self-signed certificate."""
    folder = tmp_path_factory.mktemp("tls")
    key, cert = folder / "key.pem", folder / "cert.pem"
    subprocess.run(
        [needed.program("openssl"), "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-keyout", str(key), "-out", str(cert), "-days", "2", "-subj", "/CN=localhost"],
        check=True, capture_output=True,
    )  # fmt: skip
    return key, cert


@pytest.mark.parametrize("version", ["-tls1_2", "-tls1_3"])
def test_stream(stage: Stage, certificate: tuple[Path, Path], version: str) -> None:
    """8 MB from s_client's input to s_server's output, which ends with the connection."""
    openssl = needed.program("openssl")
    key, cert = certificate
    server, port = stage.serve(lambda port: [
        openssl, "s_server", "-quiet", "-naccept", "1", "-accept", f"127.0.0.1:{port}", "-key", str(key),
        "-cert", str(cert), version,
    ], stdin=-1, stdout=-1)  # fmt: skip
    client = stage.converse("client", [
        openssl, "s_client", "-quiet", "-no_ign_eof", "-verify_return_error", "-CAfile", str(cert), version,
        "-connect", f"127.0.0.1:{port}",
    ])  # fmt: skip
    data = payload(SIZE // 2).hex().encode()  # s_client takes some capital letters for commands
    collector = Collector(server)
    Feeder(client, data).feed_by_ring(stage, port)
    assert collector.checksum() == sha256(data)
    client.expect_exit()
    server.expect_exit()


def test_download(stage: Stage, certificate: tuple[Path, Path]) -> None:
    """s_server -WWW serves a file; s_client gets every byte of it."""
    openssl = needed.program("openssl")
    key, cert = certificate
    data = payload(DOWNLOAD_SIZE)
    (stage.workdir / "file").write_bytes(data)
    _, port = stage.serve(lambda port: [
        openssl, "s_server", "-WWW", "-accept", f"127.0.0.1:{port}", "-key", str(key), "-cert", str(cert),
    ])  # fmt: skip
    client = stage.converse("client", [
        openssl, "s_client", "-quiet", "-verify_return_error", "-CAfile", str(cert), "-connect", f"127.0.0.1:{port}",
    ])  # fmt: skip
    client.tell("GET /file HTTP/1.0\r\n\r")
    answer = bytearray()
    # We read what s_client writes, so the connection lives for as long as we take our time.
    stage.check_path(port, nudge=lambda: answer.extend(client.take(DOWNLOAD_SIZE // 40)))
    answer += client.rest()
    _, _, body = bytes(answer).partition(b"\r\n\r\n")
    assert sha256(body) == sha256(data)
