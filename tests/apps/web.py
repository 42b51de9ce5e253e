"""HTTP servers and proxies in front of one another, and clients that download and upload through them.

A chain is written as its members from the client on, such as `nginx/haproxy/apache`: the last holds the files and
takes uploads (WebDAV's PUT), the others are proxies that keep their connections to the next one. The workers of
`nginx-foreign` and of `apache` are another user's if this is root; whether their connections are promoted is up to
the provider. A client makes COUNT connections at once; on each it downloads /large, uploads N.in, and downloads that
again.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import needed
from matrix import Server, build
from stage import PROGRAMS, Stage, payload

ORIGINS: Final = ("nginx", "nginx-foreign", "apache")
PROXIES: Final = ("nginx", "nginx-unbuffered", "nginx-foreign", "haproxy", "apache", "caddy")
CLIENTS: Final = ("curl", "python", "node", "java")
SHAPES: Final = ((1, 6_000_000), (2, 3_000_000), (6, 1_000_000))  # connections at once, bytes that each uploads
LARGE_SIZE: Final = 16 * 1024 * 1024
NUDGE_SIZE: Final = 100_000
WEB: Final = PROGRAMS / "web"
ROOT: Final = os.geteuid() == 0

NGINX: Final = """
daemon off;
worker_processes 2;
{user}
pid {root}/nginx.pid;
error_log {root}/error.log notice;
events {{ worker_connections 512; }}
http {{
    access_log off;
    client_body_temp_path {root}/body; proxy_temp_path {root}/proxy; fastcgi_temp_path {root}/fastcgi;
    uwsgi_temp_path {root}/uwsgi; scgi_temp_path {root}/scgi;
    sendfile on; client_max_body_size 0; keepalive_requests 1000000;
    proxy_read_timeout 600s; proxy_send_timeout 600s; send_timeout 600s; client_body_timeout 600s;
    {before}
    server {{
        listen 127.0.0.1:{port};
        {place}
    }}
}}
"""
NGINX_FILES: Final = "root {www}; location /up/ {{ dav_methods PUT; }}"
NGINX_BACK: Final = "upstream back {{ server 127.0.0.1:{back}; keepalive 8; }}"
NGINX_PROXY: Final = """location / {{
            proxy_pass http://back; proxy_http_version 1.1; proxy_set_header Connection "";
            proxy_buffering {buffering}; proxy_request_buffering {buffering};
        }}"""
HAPROXY: Final = """
global
    maxconn 500
    stats timeout 10m
defaults
    mode http
    timeout connect 10m
    timeout client 10m
    timeout server 10m
    http-reuse always
frontend front
    bind 127.0.0.1:{port}
    default_backend back
backend back
    server one 127.0.0.1:{back}
"""
CADDY: Final = """
{{
    admin off
    auto_https off
    storage file_system {root}
}}
http://:{port} {{
    bind 127.0.0.1
    reverse_proxy 127.0.0.1:{back}
}}
"""
APACHE: Final = """
ServerRoot {root}
DefaultRuntimeDir {root}
ServerName localhost
PidFile {root}/apache.pid
ErrorLog {root}/error.log
Mutex pthread
Listen 127.0.0.1:{port}
LoadModule mpm_event_module {modules}/mod_mpm_event.so
LoadModule authz_core_module {modules}/mod_authz_core.so
{user}
StartServers 2
MaxKeepAliveRequests 0
KeepAliveTimeout 600
Timeout 600
EnableSendfile On
DocumentRoot {www}
{place}
"""
APACHE_FILES: Final = """
LoadModule dav_module {modules}/mod_dav.so
LoadModule dav_fs_module {modules}/mod_dav_fs.so
DavLockDB {root}/lock
<Directory {www}>
    Require all granted
</Directory>
<Location /up>
    Dav On
</Location>
"""
APACHE_PROXY: Final = """
LoadModule proxy_module {modules}/mod_proxy.so
LoadModule proxy_http_module {modules}/mod_proxy_http.so
ProxyPass / http://127.0.0.1:{back}/ timeout=600
"""
FOREIGN: Final = ("nginx-foreign", "apache")
MODULES: Final = Path("/usr/lib/apache2/modules")


def prepare(name: str, built: Path) -> list[str]:
    """How the client `name` is started."""
    if name == "curl":
        needed.program("curl")
        return [str(WEB / "curl.sh")]
    if name == "python":
        return [needed.program("python3"), str(WEB / "client.py")]
    if name == "node":
        return [needed.program("node"), str(WEB / "client.js")]
    if name == "java":
        java, compiler = needed.program("java"), needed.program("javac")
        build(built / "Web.class", [compiler, "-d", str(built), str(WEB / "Web.java")])
        return [java, "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto", "-cp", str(built), "Web"]
    raise ValueError(f"no such client: {name}")


class Chain(Server):
    """Servers in front of one another on a stage."""

    def __init__(self, stage: Stage, name: str) -> None:
        self.name = name
        # not below the test's own directory, where servers that change their user may not look
        self.directory = tempfile.TemporaryDirectory(prefix="sidestep-chain-")
        self.place = Path(self.directory.name)
        self.place.chmod(0o755)
        self.www = self.place / "www"
        (self.www / "up").mkdir(parents=True)
        (self.www / "up").chmod(0o777)
        self.large = payload(LARGE_SIZE, len(name))
        (self.www / "large").write_bytes(self.large)
        (self.www / "nudge").write_bytes(bytes(NUDGE_SIZE))
        self.programs, self.logs = [], []
        back = 0
        for number, member in reversed(list(enumerate(name.split("/")))):
            root = self.place / f"{number}-{member}"
            root.mkdir()
            root.chmod(0o777)
            log = stage.workdir / f"{number}-{member}.shim"
            log.touch(0o666)
            program, back = stage.serve(
                lambda port, member=member, root=root, back=back: self._argv(member, root, port, back),  # type: ignore[misc]
                SIDESTEP_LOG=str(log),
            )
            self.programs.append(program)
            if not (ROOT and member in FOREIGN):
                self.logs.append(log)
        self.marks = [0] * len(self.logs)
        self.port = back

    def close(self) -> None:
        self.directory.cleanup()

    def begin(self) -> None:
        """Connections between the members last: what was promoted before counts."""

    def warm(self, client: int, connections: int) -> bool:
        """Each member sends by ring. A client may have sent all its few bytes before."""
        return all(self.promoted())

    def expected(self, sent: Sequence[bytes]) -> dict[str, bytes]:
        files = {f"{number}.out": self.large for number in range(len(sent))}
        return files | {f"{number}.back": data for number, data in enumerate(sent)}

    def _argv(self, member: str, root: Path, port: int, back: int) -> list[str]:
        words = {"root": root, "port": port, "back": back, "www": self.www, "modules": MODULES}
        path = root / "configuration"
        kind = member.partition("-")[0]
        if kind == "nginx":
            words["user"] = f"user {'www-data' if member in FOREIGN else 'root'};" if ROOT else ""
            words["buffering"] = "off" if member == "nginx-unbuffered" else "on"
            words["before"] = NGINX_BACK.format(**words) if back else ""
            words["place"] = (NGINX_PROXY if back else NGINX_FILES).format(**words)
            path.write_text(NGINX.format(**words))
            return [needed.program("nginx"), "-p", str(root), "-e", str(root / "error.log"), "-c", str(path)]
        if kind == "haproxy":
            path.write_text(HAPROXY.format(**words))
            return [needed.program("haproxy"), "-db", "-f", str(path)]
        if kind == "caddy":
            path.write_text(CADDY.format(**words))
            return [needed.program("caddy"), "run", "--adapter", "caddyfile", "--config", str(path)]
        if kind == "apache":
            words["user"] = "User www-data\nGroup www-data" if ROOT else ""
            words["place"] = (APACHE_PROXY if back else APACHE_FILES).format(**words)
            path.write_text(APACHE.format(**words))
            return [needed.program("apache2", "httpd"), "-f", str(path), "-D", "FOREGROUND"]
        raise ValueError(f"no such server: {member}")
