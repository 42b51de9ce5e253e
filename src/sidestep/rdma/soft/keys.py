"""Keys: 32-bit numbers by which memory is named on the wire (iWARP: STags).

A key is an index of 24 bits, chosen here, and a part of 8 bits that the consumer may choose. Who knows some keys must
not be able to tell others (RFC 5042 6.1.1), and an old key must not become a new one:

- The indices are walked in a secret order, a permutation made by a Feistel network of four rounds whose round functions
  are tables of random numbers. So they are scattered over all of the range, and
- an index is used again after all the others were used, which is as late as possible.
- At most `KEYS_MAX` are held at a time, so that a guess hits nothing.

Index 0 is never used, so no key is 0. A device that is real gives `secrets.SystemRandom()`; simulations give a seeded
Random and get the same keys again.
"""

from __future__ import annotations

import sys
from array import array
from typing import TYPE_CHECKING, Final, TypeAlias

from sidestep import limits
from sidestep.errors import LimitReached, Misuse

if TYPE_CHECKING:
    from random import Random

    from sidestep.rdma.soft.memory import SoftRegion
    from sidestep.rdma.soft.windows import SoftWindow

Memory: TypeAlias = "SoftRegion | SoftWindow"  # what has a key
PART_BITS: Final = 8
PART_MASK: Final = (1 << PART_BITS) - 1
_INDEX_BITS: Final = 24
_ROUNDS: Final = 4


class Keys:
    """The keys of a device, and what they name.

    Args:
        rng: Decides the order of the indices and the parts that the consumer does not choose.
        index_bits: Even; fewer than 24 serve tests.
    """

    def __init__(self, rng: Random, *, index_bits: int = _INDEX_BITS) -> None:
        self._rng = rng
        self._held_max = min(limits.KEYS_MAX, (1 << index_bits) - 1)
        self._half_bits = index_bits // 2
        self._half_mask = (1 << self._half_bits) - 1
        self._tables = [_random_table(rng, self._half_bits) for _ in range(_ROUNDS)]
        self._turn = 0
        self._held: dict[int, Memory | None] = {}  # by index
        self._valid: dict[int, Memory] = {}  # by key

    def __len__(self) -> int:
        return len(self._held)

    def get(self, key: int) -> Memory | None:
        """What has exactly this key, all 32 bits, and is valid."""
        return self._valid.get(key)

    def find(self, key: int) -> Memory | None:
        """What has exactly this key, or had it until it was invalidated."""
        found = self._held.get(key >> PART_BITS)
        return found if found is not None and found.rkey == key else None

    def take(self, part: int) -> int:
        """A key with these low 8 bits that nothing has.

        Raises:
            LimitReached: Too many are held.
        """
        if len(self._held) >= self._held_max:
            raise LimitReached(f"{self._held_max} keys are in use already")
        while True:
            index = self._index_at(self._turn)
            self._turn += 1  # the network looks at the low bits only
            if index and index not in self._held:
                break
        self._held[index] = None
        return index << PART_BITS | part

    def part(self, chosen: int | None = None) -> int:
        """The low 8 bits of a key: those that the consumer chose, or any.

        Raises:
            Misuse: It is not a number of 8 bits.
        """
        if chosen is None:
            return self._rng.getrandbits(PART_BITS)
        if not 0 <= chosen <= PART_MASK:
            raise Misuse(f"the consumer's part of a key has 8 bits, not {chosen}")
        return chosen

    def hold(self, memory: Memory) -> None:
        """The key is taken by this, and not good yet."""
        self._held[memory.rkey >> PART_BITS] = memory

    def offer(self, memory: Memory) -> None:
        self._held[memory.rkey >> PART_BITS] = memory
        self._valid[memory.rkey] = memory

    def withdraw(self, memory: Memory) -> None:
        """The key is good for nothing any more, but still taken."""
        del self._valid[memory.rkey]

    def free(self, key: int) -> None:
        """Nothing has it any more."""
        del self._held[key >> PART_BITS]

    def _index_at(self, turn: int) -> int:
        mask = self._half_mask
        left, right = turn >> self._half_bits & mask, turn & mask
        first, second, third, fourth = self._tables
        left ^= first[right]
        right ^= second[left]
        left ^= third[right]
        right ^= fourth[left]
        return left << self._half_bits | right


def _random_table(rng: Random, bits: int) -> array[int]:
    size = 1 << bits
    mask = int.from_bytes(array("H", [size - 1]) * size, sys.byteorder)
    return array("H", (rng.getrandbits(16 * size) & mask).to_bytes(2 * size, sys.byteorder))
