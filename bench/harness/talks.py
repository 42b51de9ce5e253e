"""Rows run with the programs of this directory: a server that prints its port, a client that prints its result."""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import machine
from harness.model import OURS, Measure, Settings
from harness.world import CountedEvidence, CountedWorld
from sidestep.demo.machine import memory_kib
from sidestep.demo.world import PLAIN, START_S, Evidence, Program, Sample, Site, World
from sidestep.errors import Unavailable

HERE = Path(__file__).resolve().parent.parent
BUILD = HERE / "build"
REST_S, REST_KIB, REST_LOOKS = 4.0, 4096, 10  # how memory is found to be at rest
USE_S = 0.004  # of each connection that is to be idle then
USES_MAX = 4  # a provider with little CPU time joins fewer ends in that time
SETTLE_S = 3.0  # after the last byte: rings give their pages back after a second, spins and timers end


@dataclass(frozen=True, slots=True)
class Talk:
    """A server that prints its port, and a client that keeps its connections until its input ends; both running."""

    server: Program
    client: Program
    port: int

    @classmethod
    def start(cls, world: World, server: list[str], client: list[str], lane: int = 0, site: Site | None = None) -> Talk:
        """Starts the server, at `site` where that is given, then the client with its port."""
        serving = world.start(server, site or world.server, lane=lane)
        port = int(serving.expect("listening", START_S))
        return cls(serving, world.start([text.replace("{port}", f"{port}") for text in client], lane=lane), port)

    def held(self, world: World, timeout_s: float, ends: int = 2) -> Evidence | None:
        """Waits until the client has measured and holds its connections, and looks at them."""
        self.client.expect("holding", timeout_s)
        return world.evidence(self.port, ends, self.server, self.client)

    def result(self) -> dict[str, Any]:
        """Lets the client go and returns its result."""
        result = self.client.result()
        self.server.stop()
        return result


def ran(world: CountedWorld, settings: Settings, talk: Talk) -> tuple[dict[str, Any], Evidence | None]:
    """The client's result, and the evidence; CPU time is counted after the warm-up."""
    with world.counted(talk.server, talk.client, after_s=settings.warmup_s):
        talk.client.expect("holding", _patience(settings))
    evidence = world.evidence(talk.port, 2, talk.server, talk.client)
    return talk.result(), evidence


def _held_promoted(talk: Talk, world: CountedWorld, timeout_s: float, ends: int) -> Evidence | None:
    """What is held; a client of idle connections uses them again while some are not promoted: the provider was busy."""
    evidence = talk.held(world, timeout_s, ends)
    for _ in range(USES_MAX - 1):
        if evidence is None or evidence.ok:
            break
        assert talk.client.stdin is not None
        talk.client.stdin.write("again\n")
        talk.client.stdin.flush()
        evidence = talk.held(world, timeout_s, ends)
    return evidence


def _timing(settings: Settings) -> list[str]:
    return ["-w", str(settings.warmup_s), "-t", str(settings.seconds)]


def _c(program: str, server: list[str], client: list[str]) -> tuple[list[str], list[str]]:
    path = str(BUILD / program)
    return [path, "server", *server], [path, "client", "-H", "-p", "{port}", *client]


def _patience(settings: Settings) -> float:
    return settings.warmup_s + settings.seconds + START_S


def latency(result: dict[str, Any]) -> dict[str, float]:
    """Microseconds of the percentiles in a client's result."""
    return {f"{name}_us": result[f"{name}_ns"] / 1e3 for name in ("p50", "p99", "p999") if f"{name}_ns" in result}


def pingpong(
    mode: str, *, size: int = 64, edge: bool = False, stranger: bool = False, program: str = "pingpong"
) -> Measure:
    """Median round trip of one connection, in us."""
    site = PLAIN if stranger else None

    def measure(world: CountedWorld, settings: Settings) -> Sample:
        how = ["-m", mode, "-s", str(size), *(["-e"] if edge else [])]
        talk = Talk.start(world, *_c(program, how, [*how, *_timing(settings)]), site=site)
        result, evidence = ran(world, settings, talk)
        beside = latency(result)
        return Sample(beside["p50_us"], {**beside, "rate": result["rate"]}, evidence)

    return measure


def stream(size: int, *, as_bytes: bool, stranger: bool = False, limit: bool = False) -> Measure:
    """Messages a second one way, or MB/s; with `limit`, beside sidestep's, MB/s of two copies on two CPUs alone."""
    site = PLAIN if stranger else None

    def measure(world: CountedWorld, settings: Settings) -> Sample:
        talk = Talk.start(world, *_c("stream", [], ["-s", str(size), *_timing(settings)]), site=site)
        result, evidence = ran(world, settings, talk)
        beside = {"rate": (rate := result["rate"])}
        if limit and world.name == OURS:
            copies = world.start([str(BUILD / "copies"), "client", "-p", "1", "-s", str(size), *_timing(settings)])
            beside["limit"] = copies.result(_patience(settings))["rate"] * size / 1e6
        return Sample(rate * size / 1e6 if as_bytes else rate, beside, evidence)

    return measure


def after_idle() -> Measure:
    """Median round trip of a message after an idle second, in us."""

    def measure(world: CountedWorld, settings: Settings) -> Sample:
        client = ["-r", "1", "-w", str(settings.warmup_s), "-c", str(settings.pauses)]
        talk = Talk.start(world, *_c("pingpong", [], client))
        evidence = talk.held(world, _patience(settings) + settings.pauses)
        beside = latency(talk.result())
        return Sample(beside["p50_us"], beside, evidence)

    return measure


def cost(measure: Measure, messages: float) -> Measure:
    """CPU seconds that both ends and the provider use for so many messages."""

    def costs(world: CountedWorld, settings: Settings) -> Sample:
        sample = measure(world, settings)
        if "cpus" not in world.spent:
            raise Unavailable("a program of the row ended before its CPU time was read")
        return Sample(world.spent["cpus"] * messages / sample.beside["rate"], sample.beside, sample.evidence)

    return costs


def pairs(count: int) -> Measure:
    """Messages a second of `count` pairs of processes together, each at a blocking ping-pong."""

    def measure(world: CountedWorld, settings: Settings) -> Sample:
        starting_s = 0.15 * count * (1 + world.load / 4)
        start_at = time.monotonic() + starting_s + settings.warmup_s  # all measure in the same window
        timing = ["-S", str(start_at), "-t", str(settings.seconds)]
        talks = [Talk.start(world, *_c("pingpong", [], timing), lane=lane) for lane in range(count)]
        ends = [end for talk in talks for end in (talk.server, talk.client)]
        with world.counted(*ends, after_s=start_at - time.monotonic()):
            talks[0].client.expect("holding", _patience(settings))
        for talk in talks[1:]:
            talk.client.expect("holding", _patience(settings))
        found = [world.evidence(talk.port, 2, talk.server, talk.client) for talk in talks]
        results = [talk.result() for talk in talks]
        rates = [result["rate"] for result in results]
        beside = {
            f"{name}_us": max(latency(result)[f"{name}_us"] for result in results) for name in ("p50", "p99", "p999")
        }
        beside |= {"slowest_pair": min(rates), "fastest_pair": max(rates), "rate": sum(rates)}
        return Sample(sum(rates), beside, _together([evidence for evidence in found if evidence]))

    return measure


def _together(found: list[Evidence]) -> Evidence | None:
    if not found:
        return None
    promoted, wanted = sum(each.ends_promoted for each in found), sum(each.ends_wanted for each in found)
    why_not = tuple(sorted({why for each in found for why in each.why_not}))
    counted = [each for each in found if isinstance(each, CountedEvidence)]  # not of the peer's
    counts = {name: sum(each.counts[name] for each in counted) for each in counted[:1] for name in each.counts}
    return CountedEvidence(promoted, wanted, why_not, min((each.ring_share for each in counted), default=0.0), counts)


def short(*, stranger: bool = False) -> Measure:
    """Connections a second: connect, exchange 64 B, close."""
    site = PLAIN if stranger else None

    def measure(world: CountedWorld, settings: Settings) -> Sample:
        talk = Talk.start(world, *_c("short", ["-a", "16"], ["-a", "16", *_timing(settings)]), site=site)
        talk.client.expect("holding", _patience(settings))
        world.evidence(talk.port, 0, talk.client, *([] if stranger else [talk.server]))
        result = talk.result()
        return Sample(result["rate"], latency(result))

    return measure


def untouched(program: str = "untouched") -> Measure:
    """Cost of a call on a file, a pipe or a datagram socket, in ns: the least of many, as the machine moves more.

    Beside it that of a poll, which a shim has to look at, and of a call that it has no part in.
    """

    def measure(world: CountedWorld, settings: Settings) -> Sample:
        alone = world.start([str(BUILD / program), "client", "-p", "1", *_timing(settings)])
        result = alone.result(_patience(settings))
        return Sample(result.pop("call_ns"), result)

    return measure


def python(mode: str) -> Measure:
    """Median round trip of talk.py, in us."""

    def measure(world: CountedWorld, settings: Settings) -> Sample:
        command = [sys.executable, str(HERE / "python" / "talk.py")]
        timing = ["--warmup", str(settings.warmup_s), "--seconds", str(settings.seconds)]
        client = [*command, "client", "--mode", mode, "--port", "{port}", "--hold", *timing]
        talk = Talk.start(world, [*command, "server", "--mode", mode], client)
        result, evidence = ran(world, settings, talk)
        beside = latency(result)
        return Sample(beside["p50_us"], {**beside, "rate": result["rate"]}, evidence)

    return measure


def python_transfer(size: int) -> Measure:
    """MB/s of large messages by talk.py, each acknowledged."""

    def measure(world: CountedWorld, settings: Settings) -> Sample:
        command = [sys.executable, str(HERE / "python" / "talk.py")]
        how = ["--mode", "transfer", "--size", str(size)]
        timing = ["--warmup", str(settings.warmup_s), "--seconds", str(settings.seconds)]
        client = [*command, "client", *how, "--port", "{port}", "--hold", *timing]
        talk = Talk.start(world, [*command, "server", *how], client)
        result, evidence = ran(world, settings, talk)
        return Sample(result["rate"] * size / 1e6, {**latency(result), "rate": result["rate"]}, evidence)

    return measure


def idle_cpu(connections: int) -> Measure:
    """CPU time that `connections` idle ones cost both programs together, in ms."""

    def measure(world: CountedWorld, settings: Settings) -> Sample:
        talk = Talk.start(world, *_c("idle", [], ["-n", str(connections), "-w", "1"]))
        evidence = _held_promoted(talk, world, 60.0, 2 * connections)
        time.sleep(SETTLE_S)
        pids = [talk.server.pid, talk.client.pid]
        used_by = [*pids, *(sidestep.provider_pid for sidestep in world.providers)]
        before = [machine.cpu_time_ns(pid) for pid in used_by]
        ticks = sum(map(machine.cpu_ticks, pids))
        time.sleep(settings.idle_s)
        spent = [machine.cpu_time_ns(pid) for pid in used_by]
        used = [after - start for after, start in zip(spent, before, strict=True)]
        beside = {"ticks": float(sum(map(machine.cpu_ticks, pids)) - ticks), "provider_ms": sum(used[2:]) / 1e6}
        talk.result()
        return Sample(sum(used[:2]) / 1e6, beside, evidence)

    return measure


def _memory_at_rest() -> int:
    """MemAvailable in KiB, once it has stopped to rise: freed pages stay in lists of each CPU for some seconds."""
    found = [memory_kib("MemAvailable")]
    while len(found) < 2 or (found[-1] > found[-2] + REST_KIB and len(found) < REST_LOOKS):
        time.sleep(REST_S)
        found.append(memory_kib("MemAvailable"))
    return found[-1]


def idle_memory(connections: int) -> Measure:
    """Memory that an idle connection costs the machine with both its ends, in KiB."""

    def measure(world: CountedWorld, settings: Settings) -> Sample:
        count = min(connections, settings.connections_max, resource.getrlimit(resource.RLIMIT_NOFILE)[1] - 1000)
        before = _memory_at_rest()
        talk = Talk.start(world, *_c("idle", [], ["-n", str(count), "-w", str(USE_S * count)]))
        evidence = _held_promoted(talk, world, 300.0, 2 * count)
        time.sleep(SETTLE_S)
        used = before - _memory_at_rest()
        pss = sum(map(machine.pss_kib, [talk.server.pid, talk.client.pid]))
        talk.result()
        return Sample(used / count, {"pss_kib": pss / count, "connections": float(count)}, evidence)

    return measure
