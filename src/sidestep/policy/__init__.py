"""Policy: connections that are offloaded, protocols for them, and users that may be paired. Only `disk` does I/O."""

from __future__ import annotations

from sidestep.policy.compiled import Decision, Policy
from sidestep.policy.model import BOTH, TCP, Pair, PolicyError, Problem, Role, Rule, Subject

__all__ = ["BOTH", "TCP", "Decision", "Pair", "Policy", "PolicyError", "Problem", "Role", "Rule", "Subject"]
