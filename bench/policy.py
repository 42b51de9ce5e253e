"""What a policy costs: `python bench/policy.py`.

Policies of `--rules` random rules of several kinds. Printed are seconds of CPU to read the text and to make it ready,
and microseconds of CPU of a decision, as median over batches: for programs whose rules are remembered, for programs
seen for the first time, and by looking at every rule in turn. `--memory` adds what a policy in force holds; the times
are of no use then.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

from sidestep.demo.machine import Machine
from sidestep.policy import Policy, Role, Rule, Subject
from sidestep.policy.grammar import parse
from sidestep.routing import Address

Make = Callable[[random.Random, int], Rule]
Question = tuple[Role, Subject, Address, int]

BATCH = 200
BATCHES = 50
REFERENCE_BATCH = 5
SUBJECTS = 50  # programs that ask; their classes are remembered
ROLES = [Role.CONNECT, Role.LISTEN]
TARGETS = ["both", "tcp", "sdp", "local"]


def exact_addresses(rng: random.Random, number: int) -> Rule:
    """One host and port each."""
    network = IPv4Network((0x0A000000 + number, 32))
    port = rng.randrange(65536)
    return Rule(rng.choice(TARGETS), Role.CONNECT, "*", network, (port, port))


def networks(rng: random.Random, _number: int) -> Rule:
    """Networks of every size, IPv4 and IPv6, ranges of ports."""
    first, last = sorted((rng.randrange(65536), rng.randrange(65536)))
    network = (
        IPv4Network((rng.getrandbits(32), rng.randrange(8, 33)), strict=False)
        if rng.random() < 0.7
        else IPv6Network(((0x20010DB8 << 96) + rng.getrandbits(96), rng.randrange(32, 129)), strict=False)
    )
    return Rule(rng.choice(TARGETS), rng.choice(ROLES), "*", network, (first, last))


def programs(rng: random.Random, number: int) -> Rule:
    """A program each, by name."""
    return replace(networks(rng, number), program=f"program-{number}")


def globs(rng: random.Random, number: int) -> Rule:
    """A program each, by a glob."""
    return replace(networks(rng, number), program=f"program-{number}*")


def users(rng: random.Random, number: int) -> Rule:
    """A user each, and a group each."""
    return replace(networks(rng, number), user=number % 5000, group=number % 7)


def ports_only(rng: random.Random, _number: int) -> Rule:
    """All for every address: overlapping ranges of ports."""
    first, last = sorted((rng.randrange(65536), rng.randrange(65536)))
    return Rule(rng.choice(TARGETS), rng.choice(ROLES), "*", None, (first, min(last, first + 20)))


KINDS: Sequence[Make] = (exact_addresses, networks, programs, globs, users, ports_only)


def question(rng: random.Random, rules: Sequence[Rule], subjects: Sequence[Subject]) -> Question:
    """Half of them about an address that some rule names."""
    rule = rng.choice(rules)
    address: Address = IPv4Address(rng.getrandbits(32))
    if rule.network is not None and rng.random() < 0.5:
        span = rule.network.num_addresses
        number = int(rule.network.network_address) + rng.randrange(span)
        address = IPv4Address(number) if rule.network.version == 4 else IPv6Address(number)
    port = rule.ports[0] if rng.random() < 0.5 else rng.randrange(65536)
    return rng.choice(ROLES), rng.choice(subjects), address, port


def microseconds(
    ask: Callable[[Role, Subject, Address, int], object], questions: Sequence[Question], batch: int
) -> float:
    """The median over batches of the time of one."""
    took = []
    for start in range(0, len(questions) - batch + 1, batch):
        begin = time.process_time()
        for one in questions[start : start + batch]:
            ask(*one)
        took.append((time.process_time() - begin) / batch * 1e6)
    return statistics.median(took)


def every_rule(rules: Sequence[Rule], role: Role, subject: Subject, address: Address, port: int) -> Rule | None:
    """The first rule that matches, found as a reader would."""
    for rule in rules:
        if (
            rule.role is role
            and rule.ports[0] <= port <= rule.ports[1]
            and (rule.network is None or address in rule.network)
            and any(fnmatchcase(name, rule.program) for name in subject.programs)
            and rule.user in (None, subject.uid)
            and (rule.group is None or rule.group in subject.gids)
        ):
            return rule
    return None


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rules", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--memory", action="store_true")
    given = parser.parse_args()
    print(Machine.now())
    print(f"{given.rules} rules, seed {given.seed}; medians of {BATCHES} batches of {BATCH} decisions")
    print(f"{'kind':<16} {'read':>9} {'compile':>9} {'decision':>10} {'unknown':>10} {'reference':>11} {'memory':>9}")
    for make in KINDS:
        rng = random.Random(given.seed)
        rules = [make(rng, number) for number in range(given.rules)]
        text = "\n".join(map(str, rules)).encode()
        began = time.process_time()
        parse(text)
        read_s = time.process_time() - began
        if given.memory:
            tracemalloc.start()
        began = time.process_time()
        policy = Policy(rules)
        compile_s = time.process_time() - began
        held = tracemalloc.get_traced_memory()[0] if given.memory else 0
        tracemalloc.stop()
        subjects = [
            Subject((f"program-{rng.randrange(given.rules)}",), rng.randrange(5000), frozenset(rng.sample(range(7), 2)))
            for _ in range(SUBJECTS)
        ]
        questions = [question(rng, rules, subjects) for _ in range(BATCH * BATCHES)]
        strangers = [
            (role, replace(who, uid=10_000 + number), address, port)
            for number, (role, who, address, port) in enumerate(questions[:2000])
        ]
        for ask in questions[:20]:
            assert policy.decide(*ask).rule is every_rule(rules, *ask)
        decide_us = microseconds(policy.decide, questions, BATCH)
        unknown_us = microseconds(policy.decide, strangers, 50)
        reference_us = microseconds(partial(every_rule, rules), questions[:50], REFERENCE_BATCH)
        memory = f"{held / (1 << 20):.1f} MiB" if given.memory else ""
        print(
            f"{make.__name__:<16} {read_s:>7.3f} s {compile_s:>7.3f} s {decide_us:>7.2f} us {unknown_us:>7.1f} us "
            f"{reference_us:>8.0f} us {memory:>9}"
        )


if __name__ == "__main__":
    main()
