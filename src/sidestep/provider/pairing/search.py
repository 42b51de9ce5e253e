"""Claims whose offer was made in another network namespace: the first candidate whose path is proven is the one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from sidestep.errors import LimitReached
from sidestep.provider.clients import Brought, Client
from sidestep.provider.proof.evidence import Evidence
from sidestep.provider.proof.path import PathProofs, Proof
from sidestep.provider.rpc import Packet
from sidestep.switch.offers import Offer


@dataclass(slots=True, eq=False)
class Search:
    """One claim's; `on_found` is called once with the offer, or None, unless the search is ended before."""

    claimer: Client
    claim: Packet
    evidence: Evidence
    on_found: Callable[[Search, Offer[Brought] | None], None]
    on_end: Callable[[], object]
    proofs: list[Proof] = field(default_factory=list)
    failed: int = 0
    over: bool = False

    def begin(self, candidates: list[Offer[Brought]], paths: PathProofs) -> bool:
        """Begins a proof for each that agrees with the claim; False: there is none. Raises LimitReached."""
        try:
            for offer in candidates:
                self._try(offer, paths)
        except LimitReached:
            self.end()
            raise
        if not self.proofs:
            self.end()
        return bool(self.proofs)

    def _try(self, offer: Offer[Brought], paths: PathProofs) -> None:
        way, facts, shown = self.evidence.way, self.evidence.facts, offer.brought.evidence
        if way is None or facts is None or shown.way is None or shown.facts is None or not shown.facts.agrees(facts):
            return

        def done(proven: bool) -> None:
            if self.over:
                return
            if proven:
                self.on_found(self, offer)
                return
            self.failed += 1
            if self.failed == len(self.proofs):
                self.on_found(self, None)

        self.proofs.append(paths.start(shown.way, way, uid=self.claimer.uid, on_done=done))

    def end(self) -> None:
        """Gives everything back; does nothing the second time."""
        if self.over:
            return
        self.over = True
        self.on_end()
        for proof in self.proofs:
            proof.end(False)
        self.evidence.close()
        self.claim.descriptors.close()
