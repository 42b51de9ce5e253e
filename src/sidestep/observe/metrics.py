"""Metrics for Prometheus: the state of connections, programs and the provider at the time of the scrape.

A process of its own serves them, so the provider keeps its one thread and no HTTP. Looking costs it a few short
requests a scrape, and nothing between scrapes. The exporter keeps the totals, as a Prometheus counter must not go down.
An ended connection is counted if a scrape finds it before its place in the program's memory is used again, or the
provider forgets it. Where many come and go between two scrapes, some are not counted; scrape more often to lose less.
Both ends of a connection are counted where both are under sidestep.

No label has an unbounded set of values: there are no series of single connections or programs; `sidestep top` has them.
Links to other hosts are summed up by protocol, device and host (`sidestep.observe.links`), the counters of RDMA devices
by device (`sidestep.observe.device_totals`).
"""

from __future__ import annotations

import os
import re
import socket
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from socketserver import TCPServer
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import make_wsgi_app
from prometheus_client.registry import Collector

from sidestep import config, limits
from sidestep.counters import NAMES
from sidestep.errors import Unavailable
from sidestep.native.layout import State
from sidestep.observe.connections import Ended, ended
from sidestep.observe.device_totals import DeviceTotals
from sidestep.observe.links import LinkTotals, Sum, modes, sums
from sidestep.observe.traffic import Sample, Totals, take_sample

_COUNTER: Final = re.compile(r"(\w+)(?:\{(.*)\})?")
_GAUGES: Final = {
    "shims": ("sidestep_programs", "Processes under sidestep at this provider"),
    "families": ("sidestep_program_families", "Process families, that share connections by fork"),
    "offers_pending": ("sidestep_offers_pending", "Offers that wait for the other end"),
    "budget_bytes": ("sidestep_channel_budget_bytes", "Bytes that all channels together may take"),
    "budget_used_bytes": ("sidestep_channel_budget_used_bytes", "Bytes that channels have reserved"),
    "uptime_s": ("sidestep_provider_uptime_seconds", "Seconds since the provider was started"),
}


_START_PAGE: Final = """<!DOCTYPE html>
<html lang="en">
<title>sidestep metrics</title>
<h1>sidestep metrics</h1>
<p><a href="/metrics">/metrics</a> has the metrics of this host's provider, for Prometheus.
<p>In a terminal, <code>sidestep top</code> shows rates, and <code>sidestep explain</code> what carries each connection.
</html>
"""
_WAY: Final = ("protocol", "device", "peer")
_LINK_GAUGES: Final[tuple[tuple[str, str, Callable[[Sum], int]], ...]] = (
    ("s", "Links to other hosts, one for each connection that is carried there", lambda one: one.links),
    ("_send_credits", "Messages that may be sent now, all links together", lambda one: one.credit),
    ("_receive_credits", "Messages that the other ends may send now", lambda one: one.remote_credit),
    ("_receives_posted", "Private buffers that wait for messages", lambda one: one.receives_posted),
    ("_adverts", "Advertisements of this end that are outstanding", lambda one: one.adverts),
    ("_remote_adverts", "Advertisements of the other ends that are outstanding", lambda one: one.remote_adverts),
    ("_held_bytes", "Bytes that were sent and are not read at the other end", lambda one: one.held),
    ("s_by_engine", "Of the links, those that compiled code carries at this moment", lambda one: one.engine),
)


class Exporter(Collector):
    """Looks once for each scrape, and keeps the totals in between."""

    def __init__(self, socket_path: Path) -> None:
        self._socket_path = socket_path
        self._totals = Totals()
        self._devices = DeviceTotals()
        self._lock = threading.Lock()  # scrapes may overlap
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def describe(self) -> Iterable[Metric]:
        """Always empty: names are not needed before the first scrape."""
        return ()

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """Looks, and yields all metrics; without a provider only that there is none, and the totals so far."""
        with self._lock:
            try:
                sample = take_sample(self._socket_path)
                self._totals.handle(sample.connections.values(), self._ended())
                self._devices.handle(sample.devices)
            except Unavailable:
                sample = None
            yield GaugeMetricFamily("sidestep_provider_up", "Whether the provider answers", value=sample is not None)
            yield from self._traffic()
            yield from _link_traffic(self._totals.links)
            yield from _of_devices(self._devices, now=sample is not None)
            if sample is not None:
                yield from _connections(sample)
                yield from _links(sample, self._totals.links)
                yield from _provider(sample.status)

    def _ended(self) -> list[Ended]:
        try:
            return ended(self._socket_path)
        except Unavailable:
            if not config.answers(self._socket_path):
                raise
            return []  # a provider of a version that remembers none

    def _traffic(self) -> Iterator[Metric]:
        counts = self._totals.counts
        for unit in ("bytes", "messages"):
            text = f"{unit.capitalize()} that programs moved, by path and direction, each end for itself"
            family = CounterMetricFamily(f"sidestep_{unit}", text, labels=("path", "direction"))
            for path in ("ring", "tcp"):
                for direction in ("sent", "received"):
                    family.add_metric((path, direction), counts[f"{direction}_{path}_{unit}"])
            yield family
        yield CounterMetricFamily(
            "sidestep_doorbells", "Wake-ups that were sent to the other end", value=counts["doorbells"]
        )
        yield CounterMetricFamily("sidestep_sleeps", "Waits that ended in the kernel", value=counts["sleeps"])
        spins = CounterMetricFamily("sidestep_spins", "Waits that began by spinning, by result", labels=("result",))
        spins.add_metric(("won",), counts["spins_won"])
        spins.add_metric(("lost",), counts["spins_lost"])
        yield spins
        yield CounterMetricFamily(
            "sidestep_connections_seen", "Connections that a scrape has seen", value=self._totals.connections
        )
        yield CounterMetricFamily(
            "sidestep_connections_promoted", "Of these, such as were promoted", value=self._totals.promoted
        )
        text = "Connections that a scrape has seen to have ended, each end for itself, by state and reason at their end"
        family = CounterMetricFamily("sidestep_connections_ended", text, labels=("state", "reason"))
        for labels, count in sorted(self._totals.ended.items()):
            family.add_metric(labels, count)
        yield family


def _connections(sample: Sample) -> Iterator[Metric]:
    family = GaugeMetricFamily(
        "sidestep_connections", "Live connections, each end for itself, by state and reason", labels=("state", "reason")
    )
    found = Counter({(state.name.lower(), ""): 0 for state in State if state is not State.FREE})
    found.update((one.state, one.reason or "") for one in sample.connections.values())
    for labels, count in sorted(found.items()):
        family.add_metric(labels, count)
    yield family


def _link_traffic(totals: LinkTotals) -> Iterator[Metric]:
    whole = CounterMetricFamily(
        "sidestep_link_bytes", "Bytes of programs that went over links to other hosts", labels=(*_WAY, "direction")
    )
    zcopy = CounterMetricFamily(
        "sidestep_link_zcopy_bytes", "Of all bytes over links, those by RDMA Read or Write",
        labels=(*_WAY, "direction", "mechanism"),
    )  # fmt: skip
    packets = CounterMetricFamily(
        "sidestep_link_packets", "Packets of links over devices that send packets, such as roce",
        labels=(*_WAY, "direction"),
    )  # fmt: skip
    again = CounterMetricFamily("sidestep_link_packets_resent", "Of the packets sent, those sent again", labels=_WAY)
    naks = CounterMetricFamily(
        "sidestep_link_naks", "Negative acknowledgements over links", labels=(*_WAY, "direction")
    )
    families = {"bytes": whole, "zcopy_bytes": zcopy, "packets": packets, "packets_resent": again, "naks": naks}
    for (way, unit, direction, mechanism), count in sorted(totals.counts.items()):
        families[unit].add_metric((*way, *filter(None, (direction, mechanism))), count)
    yield from families.values()


def _links(sample: Sample, totals: LinkTotals) -> Iterator[Metric]:
    found = sums(sample.links, totals.named)
    for name, text, read in _LINK_GAUGES:
        family = GaugeMetricFamily(f"sidestep_link{name}", text, labels=_WAY)
        for way, whole in sorted(found.items()):
            family.add_metric(way, read(whole))
        yield family
    family = GaugeMetricFamily(
        "sidestep_link_modes", "Links by what they do now", labels=("protocol", "direction", "mode", "mechanism")
    )
    for labels, count in sorted(modes(sample.links).items()):
        family.add_metric(labels, count)
    yield family


def _of_devices(totals: DeviceTotals, *, now: bool) -> Iterator[Metric]:
    family = CounterMetricFamily(
        "sidestep_device_events", "What the provider's RDMA devices count, by their own names",
        labels=("device", "event", "reason"),
    )  # fmt: skip
    for labels, count in sorted(totals.counts.items()):
        family.add_metric(labels, count)
    yield family
    if now:
        present = GaugeMetricFamily(
            "sidestep_device_objects", "What there is on the provider's RDMA devices", labels=("device", "kind")
        )
        for of, count in sorted(totals.present.items()):
            present.add_metric(of, count)
        yield present


def _provider(status: Any) -> Iterator[Metric]:
    for name, (metric, text) in _GAUGES.items():
        yield GaugeMetricFamily(metric, text, value=status[name])
    yield InfoMetricFamily(
        "sidestep_provider", "The provider", {"version": status["version"], "layout": str(status["layout_version"])}
    )
    families = {
        name: CounterMetricFamily(f"sidestep_{name}", f"The provider's count: {text}", labels=("reason",))
        for name, text in NAMES.items()
    }
    for full_name, count in status["counters"].items():
        found = _COUNTER.fullmatch(full_name)
        if found and found[1] in families:  # else of a newer provider: left out
            families[found[1]].add_metric((found[2] or "",), count)
    yield from families.values()


def _start_page(_environ: Any, start_response: Any) -> list[bytes]:
    start_response("200 OK", [("Content-Type", "text/html; charset=utf-8")])
    return [_START_PAGE.encode()]


class _Handler(WSGIRequestHandler):
    def log_message(self, *_: object) -> None:  # a scraper comes every few seconds
        pass


class MetricsServer(WSGIServer):
    """Serves an exporter at a TCP address or a UNIX socket, with a bounded number of threads."""

    request_queue_size = limits.METRICS_REQUESTS_MAX
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int] | Path, exporter: Exporter) -> None:
        """Listens at once.

        Raises:
            Unavailable: The address cannot be listened at.
        """
        self._path: Path | None = None  # inode of the socket that is ours to remove
        self._free = threading.BoundedSemaphore(limits.METRICS_REQUESTS_MAX)
        self._serving: dict[socket.socket, float] = {}  # start, by time.monotonic()
        if isinstance(address, Path):
            self.address_family, self.allow_reuse_address = socket.AF_UNIX, False
        else:
            self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        try:
            if isinstance(address, Path):
                _remove_stale(address)
            super().__init__(os.fspath(address) if isinstance(address, Path) else address, _Handler)  # type: ignore[arg-type]
        except OSError as error:
            shown = address if isinstance(address, Path) else "{}:{}".format(*address)
            raise Unavailable(
                f"cannot listen at {shown}: {error.strerror or error}", remedy="give another place with --listen"
            ) from error
        metrics = make_wsgi_app(exporter.registry)
        self.set_app(lambda environ, start: (_start_page if environ["PATH_INFO"] == "/" else metrics)(environ, start))

    @property
    def url(self) -> str:
        if self._path:
            return f"unix:{self._path}"
        host, port = self.server_address[:2]
        shown = host.decode() if isinstance(host, bytes) else host
        return f"http://{f'[{shown}]' if ':' in shown else shown}:{port}/metrics"

    def server_bind(self) -> None:
        """Binds; a UNIX socket for this user alone."""
        mask = os.umask(0o177)
        try:
            TCPServer.server_bind(self)
        finally:
            os.umask(mask)
        if self.address_family == socket.AF_UNIX:
            self._path = Path(os.fsdecode(self.socket.getsockname()))
        self.server_name, self.server_port = "localhost", 0  # variables of CGI, which nothing reads
        self.setup_environ()

    def server_close(self) -> None:
        super().server_close()
        if self._path:
            self._path.unlink(missing_ok=True)

    def get_request(self) -> tuple[Any, Any]:
        """The next connection; one by a UNIX socket has no address, which the handler would miss."""
        request, address = super().get_request()
        return request, address or ("unix", 0)

    def process_request(self, request: Any, client_address: Any) -> None:
        """A thread for each; the connection is closed where there are too many."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        self._serving[request] = time.monotonic()
        threading.Thread(target=self._serve, args=(request, client_address), daemon=True).start()

    def service_actions(self) -> None:
        """Closes connections whose time is over: a byte now and then would keep a thread for ever."""
        for request, since in tuple(self._serving.items()):
            if time.monotonic() - since > limits.METRICS_REQUEST_TIMEOUT_S:
                with suppress(OSError):  # the request has just been closed
                    request.shutdown(socket.SHUT_RDWR)

    def _serve(self, request: Any, client_address: Any) -> None:
        try:
            with suppress(OSError):  # the scraper went away, or was too slow
                self.finish_request(request, client_address)
        finally:
            del self._serving[request]
            self.shutdown_request(request)
            self._free.release()


def _remove_stale(path: Path) -> None:
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            return
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
