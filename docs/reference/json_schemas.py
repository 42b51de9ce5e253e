"""The JSON Schemas of what commands print by --json; `make.py` writes them to docs/reference/schemas.

What a document holds is written as Python types: of a record its fields, of a dict its keys (a `?` at the end: may be
left out), of a list its one element, of a tuple what it may be instead. The tests run the commands and allow nothing
that is not here.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Final, Union, get_args, get_origin, get_type_hints

from sidestep.cli import shown
from sidestep.demo.hosts import Way
from sidestep.demo.machine import Machine
from sidestep.gain import Profile
from sidestep.observe.connections import Connection
from sidestep.observe.demotion import Result
from sidestep.observe.device_totals import DeviceActivity
from sidestep.observe.doctor import Finding, Level
from sidestep.observe.explain import Explanation, Verdict
from sidestep.observe.rdma import ProcessView
from sidestep.rdma.kernel.sysfs import KernelDeviceView
from sidestep.remote.gateway import Tally
from sidestep.switch.protocol import Capabilities

_PLAIN: Final = {int: "integer", float: "number", str: "string", bool: "boolean", NoneType: "null"}
_NUMBERS: Final = dict[str, int]  # counters, by name


def _fields(record: type, *, without: str = "") -> dict[str, Any]:
    """The fields of a record, each with its comment."""
    comments = dict(re.findall(r"(?m)^    (\w+): .*?  # (.*)$", inspect.getsource(record)))
    hints = get_type_hints(record)
    return {name: _Told(hint, comments.get(name, "")) for name, hint in hints.items() if name != without}


class _Told:
    """What something is, and what there is to say of it."""

    def __init__(self, what: Any, text: str) -> None:
        self.what = what
        self.text = text


_CONNECTION: Final = _fields(Connection, without="key")
_RATE: Final = {
    "messages_per_s": float, "bytes_per_s": float, "ring_share": float | None, "doorbells_per_s": float,
    "sleeps_per_message": float | None, "spins_per_message": float | None,
}  # fmt: skip
_MACHINE: Final = _fields(Machine) | {"load": list[float]}
_BENCH_HOST: Final = {"version": str, "machine": _MACHINE, "devices": [KernelDeviceView]}
_RULE: Final = ({"file": str, "line": int, "text": str}, None)
_ROUTE: Final = ({"interface": str, "first_hop": str | None, "source": str | None, "local": bool}, None)
_DECISION: Final = {
    "role": str, "program": str | None, "uid": int, "endpoint": str, "target": str, "over": str | None, "rule": _RULE,
    "route": _ROUTE, "protocol": str | None, "why": str,
}  # fmt: skip
_STATUS: Final = {
    "pid": int, "version": str, "layout_version": int, "layout_oldest": int, "socket": str, "uptime_s": float,
    "netns_cookie": int, "shims": int, "families": int, "offers_pending": int, "explicit_binds": int,
    "budget_bytes": int, "budget_used_bytes": int, "clients_max": int, "promote_after": str, "ring_size": int,
    "offer_expiry_s": float, "idle_exit_s": float, "proves_paths": bool, "remote": str,
    "workers": [{"pid": int, "connections": int}],
    "policy": {
        "places": list[str], "rules": int, "errors": int, "first_error": str | None, "generation": int,
        "blind": str | None,
    },
    "counters": _NUMBERS,
}  # fmt: skip
_MESSAGE: Final = {
    "message": str, "mid?": int, "flags?": list[str], "bufs?": int, "len?": int, "mseq?": int, "mseq_ack?": int,
    "header?": dict[str, Any], "payload_len": int, "bytes": str, "missing?": int, "fault?": {"rule": str, "text": str},
}  # fmt: skip
_EVENT: Final = {
    "frame": int, "time_ns": int, "wire": str, "from": str, "to": str, "connection": int | None, "side": str | None,
    "what": str, "note?": str, "text?": str, "solicited?": bool,
}  # fmt: skip
_ENDS: Final = {"left": int, "right": int}
_OUTCOMES: Final = {"connections": [{"result": Result, "done": bool, "connection": _CONNECTION}]}
_CHANGED: Final = {"name": str, "done": bool}

# By command, with dots.
DOCUMENTS: Final[dict[str, Any]] = {
    "ss": {"connections": [_CONNECTION]},
    "explain": {
        "explanations": [
            _fields(Explanation)
            | {
                "verdict": {one.name.lower() for one in Verdict},
                "facts": dict[str, str],
                "connection": (_CONNECTION, None),
            }
        ]
    },
    "top": {
        "seconds": float, "total": _RATE, "states": _NUMBERS, "reasons": _NUMBERS,
        "connections": [_CONNECTION | {"rate": _RATE}], "devices": [DeviceActivity], "provider": _STATUS,
    },
    "demote": _OUTCOMES,
    "promote": _OUTCOMES,
    "check": {"program": str, "verdict": Level, "findings": [Finding]},
    "doctor": {"findings": [Finding]},
    "demo": {
        "machine": _MACHINE, "rounds": int, "seconds": float,
        "others": {"before": float, "during": float}, "warnings": list[str],
        "works": [{
            "work": str, "title": str, "unit": str, "lower_is_better": bool,
            "places": dict[str, dict[str, Any]], "best_tcp": str, "ratio": float, "spread": float, "promoted": bool,
            "why_not_promoted": list[str], "equal": bool,
        }],
        "slower": dict[str, str], "skipped": dict[str, str], "good": bool,
    },
    "bundle": {"directory": str, "at": str, "files": list[str], "bytes": int},
    "service.list": {"services": [{"unit": str, "file": str, "state": str}]},
    "provider.start": {"pid": int, "started": bool, "socket": str},
    "provider.stop": {"pid": int, "stopped": bool},
    "provider.status": _STATUS,
    "provider.modules": {
        "modules": [{
            "kind": str, "name": str, "state": str, "provided_by": str, "capabilities": (
                _fields(Capabilities) | {"families": list[int]}, None,
            ), "why": str,
        }],
    },
    "provider.add": _CHANGED,
    "provider.remove": _CHANGED,
    "policy.check": {
        "files": list[str], "rules": int, "pairs": int, "errors": int, "warnings": int,
        "problems": [{
            "level": str, "file": str, "line": int, "column": int, "word": str, "message": str, "remedy": str,
        }],
    },
    "policy.test": _DECISION | {"device": str | None, "note": str | None, "failed?": bool},
    "policy.trace": _DECISION | {"sequence": int, "time": float, "failed": bool},
    "gateway": {
        "pid": int, "draining": bool, "active": int,
        "rules": [{"rule": str, "listening": str, "rdma_port": int} | _fields(Tally)],
    },
    "capture": {"frames": int, "connections": int, "processes": int, "dropped": int},
    "sdp.decode": (_MESSAGE, _EVENT | {f"{name.removesuffix('?')}?": what for name, what in _MESSAGE.items()}),
    "sdp.simulate": {
        "seed": int, "kind": str, "fault": str | None, "messages?": _ENDS, "received?": _ENDS, "ended_s?": float,
        "entries": [{"at_s": float, "end": str, "what": str, "text": str, "sdp?": _MESSAGE}],
    },
    "rdma.list": {"kernel_devices": [KernelDeviceView], "processes": [ProcessView]},
    "rdma.ping": {
        "server": str, "size": int, "sent": int, "received": int, "wrong": int, "round_trip_us": dict[str, float],
        "error": str | None, "queue_pair": dict[str, Any],
    },
    "rdma.bw": {
        "server": str, "op": str, "both": bool, "size": int, "depth": int, "verified": bool, "messages": int,
        "remote_messages": int, "wrong": int, "complete": bool, "seconds": float, "bytes_per_s": float,
        "messages_per_s": float, "cpu_percent": float, "remote_cpu_percent": float, "queue_pair": dict[str, Any],
    },
    "rdma.bench": {
        "client": _BENCH_HOST, "server": _BENCH_HOST,
        "rows": [{
            "way": Way, "problem": str, "round_trip_us": float | None, "messages_per_s": float | None,
            "mb_per_s": float | None, "message_us": dict[str, list[float]], "carried": dict[str, str],
        }],
    },
    "rdma.profile": {**_fields(Profile), "option": str},
    "rdma.server": {"listening": [{"address": str, "port": int}]},
}  # fmt: skip


def schema_of(what: Any) -> dict[str, Any]:
    """The JSON Schema of what is written as a type."""
    if isinstance(what, _Told):
        return schema_of(what.what) | ({"description": what.text} if what.text else {})
    if isinstance(what, dict):
        names = {name.removesuffix("?"): schema_of(each) for name, each in what.items()}
        required = [name for name in what if not name.endswith("?")]
        return {"type": "object", "properties": names, "required": required}
    if isinstance(what, list):
        return {"type": "array", "items": schema_of(what[0])}
    if isinstance(what, set):
        return {"enum": sorted(what)}
    if isinstance(what, tuple):
        return {"anyOf": [schema_of(each) for each in what]}
    if what is None:
        return {"type": "null"}
    return _schema_of_type(what)


def _schema_of_type(what: Any) -> dict[str, Any]:
    if what is Any:
        return {}
    if what in _PLAIN:
        return {"type": _PLAIN[what]}
    arguments = get_args(what)
    if get_origin(what) in (Union, UnionType):
        return schema_of(tuple(arguments))
    if get_origin(what) is list:
        return schema_of([arguments[0]])
    if get_origin(what) is dict:
        return {"type": "object", "additionalProperties": schema_of(arguments[1])}
    if isinstance(what, type) and (is_dataclass(what) or issubclass(what, tuple)):
        return schema_of(_fields(what))
    if issubclass(what, Enum):
        return schema_of({one.value for one in what})
    raise TypeError(f"no JSON Schema for {what}")


def pages() -> Iterator[tuple[str, str]]:
    """Each file, and its text."""
    for name, document in DOCUMENTS.items():
        identity = shown.schema_name(name)
        alternatives = document if isinstance(document, tuple) else (document,)
        made = [schema_of({"schema": {identity}} | each) for each in alternatives]
        command = f"sidestep {name.replace('.', ' ')} --json"
        head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": identity, "description": command}
        whole = head | (made[0] if len(made) == 1 else {"anyOf": made})
        yield f"schemas/{name}.json", json.dumps(whole, indent=1) + "\n"
