"""`layout.h`, out of `layout.py` and `defaults.py`: the build runs ``python header.py LAYOUT.PY DEFAULTS.PY OUT``."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Mapping
from enum import IntEnum
from types import ModuleType, SimpleNamespace
from typing import Any, Final, cast

_CTYPES: Final = {"B": "uint8_t", "H": "uint16_t", "I": "uint32_t", "Q": "uint64_t"}


def _table(
    way: str, states: type[IntEnum], events: type[IntEnum], transitions: Mapping[tuple[Any, Any], IntEnum]
) -> list[str]:
    """A table of states and events in C; 0xff stands for what cannot happen."""
    rows = (", ".join(str(int(transitions.get((state, event), 0xFF))) for event in events) for state in states)
    return [
        "",
        f"#define {way}_STATES {len(states)}u",
        f"#define {way}_EVENTS {len(events)}u",
        f"#define {way}_NEXT {{ {', '.join(f'{{ {row} }}' for row in rows)} }}",
    ]


def c_header(layout: ModuleType, defaults: ModuleType) -> str:
    """The header, of modules that have what these two have."""
    lines = ["/* Made from layout.py and defaults.py by the build; change it there. */"]
    lines += ["#ifndef SIDESTEP_LAYOUT_H", "#define SIDESTEP_LAYOUT_H"]
    lines += [f"#include <{name}.h>" for name in ("assert", "stdatomic", "stddef", "stdint")]
    lines += [""]
    for name in (
        "LAYOUT_VERSION", "RPC_MAGIC", "REGISTRY_BUCKETS", "REGISTRY_BUCKETS_OFFSET", "REGISTRY_SIZE",
        "ARENA_SLOTS_OFFSET", "ARENA_SLOTS_MAX", "ARENA_MAGIC", "CHANNEL_ROUNDS", "HOLDER_STRANGER", "SLOT_RELAY_OVER",
        "DOORBELLS_PER_PAGE", "TRANSLATED_ADDRESS", "TRANSLATED_MASK", "GAIN_MIN_NS", "SDP_DATA", "HINT_RING_ALWAYS",
        "NONCE_COUNT", "NONCE_TAKEN", "LINK_DATA", "LINK_READ",
    ):  # fmt: skip
        lines.append(f"#define {name} {getattr(layout, name):#x}u")
    numbers = {name: value for name, value in vars(defaults).items() if isinstance(value, int)}
    lines += [f"#define {name} {value:#x}u" for name, value in numbers.items()]
    lines.append(f'#define SYSTEM_SOCKET "{defaults.SYSTEM_SOCKET}"')
    lines += [
        "#ifndef CHANNEL_SPILL /* a test has less */",
        f"#define CHANNEL_SPILL {layout.CHANNEL_SPILL:#x}u",
        "#endif",
    ]
    for name in layout.EXPLICIT_NUMBERS:
        lines.append(f"#define {name} {getattr(layout, name):#x}")  # signed, as socket() takes them
    prefixes = {
        "Notice": "CHANNEL", "Seen": "CHANNEL_SEEN", "Acked": "CHANNEL_ACKED", "Back": "CHANNEL", "TxEvent": "TX_ON",
        "RxEvent": "RX_ON",
    }  # fmt: skip
    for name in (
        "Rpc", "Welcome", "Attach", "Doorbells", "Ask", "Refusal", "State", "Reason", "Role", "Notice", "Seen", "Knows",
        "Acked", "Back", "Spacer", "Tx", "TxEvent", "Rx", "RxEvent",
    ):  # fmt: skip
        lines += ["", f"enum {re.sub(r'(?<=.)(?=[A-Z])', '_', name).lower()}_code {{"]
        prefix = prefixes.get(name, name.upper())
        lines += [f"\t{prefix}_{member.name} = {member.value}," for member in getattr(layout, name)]
        lines += ["};"]
    lines += _table("TX", layout.Tx, layout.TxEvent, layout.TX_TRANSITIONS)
    lines += _table("RX", layout.Rx, layout.RxEvent, layout.RX_TRANSITIONS)
    for record, fields in layout.RECORDS.items():
        lines += ["", f"struct {record} {{"]
        for name, code, n in fields:
            atomic = "_Atomic " if name in layout.ATOMIC.get(record, ()) else ""
            lines.append(f"\t{atomic}{_CTYPES[code]} {name}{f'[{n}]' if n > 1 else ''};")
        lines += ["};"]
        lines += [
            f'static_assert(offsetof(struct {record}, {name}) == {at}, "layout");'
            for name, at in layout.offsets(record).items()
        ]
        lines += [f'static_assert(sizeof(struct {record}) == {layout.size(record)}, "layout");']
    # lists of names, for tables by name and for what is done with each of them
    for record in layout.CHANNEL_RECORDS:
        names = " ".join(f"WORD(at, {name})" for name, _, _ in layout.RECORDS[record] if name != "pad")
        lines += ["", f"#define {record.upper()}_WORDS(WORD, at) {names}"]
    lines += [
        "",
        f"#define CHANNEL_REMOTE_WORDS(WORD) {' '.join(f'WORD({name})' for name in layout.PeerState._fields[:-1])}",
    ]
    return "\n".join([*lines, "", "#endif", ""])


if __name__ == "__main__":
    layout, defaults = (cast(ModuleType, SimpleNamespace(**runpy.run_path(path))) for path in sys.argv[1:3])
    with open(sys.argv[3], "w", encoding="ascii") as out:
        out.write(c_header(layout, defaults))
