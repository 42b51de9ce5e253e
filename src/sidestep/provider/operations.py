"""Requests of commands to a provider, and its answers: one JSON document each, with descriptors beside some.

`users` has the rules about who may look, and at which connections. Root may govern, and the user whose provider it is.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from ipaddress import ip_address
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final, TypeAlias

from sidestep import __version__, limits
from sidestep.errors import Misuse, PeerViolation, SidestepError, Unavailable
from sidestep.native import layout
from sidestep.native.layout import Rpc
from sidestep.policy import Role, Subject
from sidestep.provider import commands
from sidestep.provider.arena import pid_namespace_of
from sidestep.provider.carry.hub import page
from sidestep.provider.clients import Client
from sidestep.provider.parts import Parts
from sidestep.provider.proof import duplicate
from sidestep.provider.rpc import Message, Packet, expect
from sidestep.provider.users import in_container
from sidestep.settings import Proof
from sidestep.switch.modules import Protocols
from sidestep.switch.protocol import Endpoint, Request, Row
from sidestep.switch.transports import Transports

_GOVERNING: Final = ("stop", "module_add", "module_remove")
_NOT_ALLOWED: Final = {
    "error": "only root and the provider's own user may do that",
    "remedy": "be root, outside of containers",
}
_LINKS_OF_ONE: Final = 1 << 20  # more connections than one process carries: the next one's are counted from here on


Reply: TypeAlias = Callable[..., None]  # takes the document, and descriptors beside it


class Operations:
    """Operations of one provider."""

    def __init__(self, parts: Parts, stop_loop: Callable[[], None]) -> None:
        self._parts = parts
        self._stop_loop = stop_loop
        self._started_at = parts.loop.now

    def handle(self, client: Client, packet: Packet) -> None:
        """CONTROL: does what is asked, and answers."""
        if len(packet.descriptors):
            expect(packet, 1)
            here = duplicate.made_in(packet.descriptors[0], self._parts.netns_cookie)
            client.at_home = here and not in_container(client)
        if len(packet.body) > limits.CONTROL_REQUEST_MAX:
            raise PeerViolation("a control request is too long", rule="malformed")
        try:
            request = json.loads(packet.body)
        except (ValueError, RecursionError) as error:
            raise PeerViolation(f"a control request is not JSON: {error}", rule="malformed") from error
        operation = self._KNOWN.get(str(request.get("op"))) if isinstance(request, dict) else None
        reply = partial(self._reply, client, packet.message.token)
        if operation is None:
            reply({"error": f"unknown request; known: {sorted(self._KNOWN)}"})
        elif request["op"] in _GOVERNING and not self._parts.users.governs(client):
            reply(_NOT_ALLOWED)
        else:
            try:
                operation(self, client, request, reply)
            except (Misuse, Unavailable) as error:
                reply(_refusal(error))

    def _reply(self, client: Client, token: int, document: dict[str, Any], fds: Sequence[int] = ()) -> None:
        body = json.dumps(document).encode()
        if len(body) > limits.CONTROL_PIECE_MAX:
            raise AssertionError(f"a control reply of {len(body)} bytes")
        self._parts.table.send(client, Message(type=Rpc.CONTROL_REPLY, token=token), fds, body)

    def _modules(self) -> dict[str, Protocols | Transports]:
        return {"protocol": self._parts.protocols, "transport": self._parts.transports}

    def _status(self, client: Client, _request: dict[str, Any], reply: Reply) -> None:
        settings = self._parts.settings
        document = {
            "pid": os.getpid(),
            "version": __version__,
            "layout_version": layout.LAYOUT_VERSION,
            "layout_oldest": layout.LAYOUTS.start,
            "socket": str(settings.socket),
            "uptime_s": round(self._parts.loop.now - self._started_at, 3),
            "netns_cookie": self._parts.netns_cookie,
            "shims": self._parts.table.shims,
            "families": len(self._parts.table.arenas),
            "offers_pending": len(self._parts.pairing),
            "explicit_binds": len(self._parts.explicit),
            "budget_bytes": self._parts.pairing.shared.segments.budget.limit_bytes,
            "budget_used_bytes": self._parts.pairing.shared.segments.budget.used_bytes,
            "clients_max": self._parts.clients_max,
            "promote_after": str(settings.promote_after),
            "ring_size": settings.ring_size,
            "offer_expiry_s": settings.offer_expiry_s,
            "idle_exit_s": settings.idle_exit_s,
            "proves_paths": bool(settings.wants & layout.Welcome.PATH),
            "remote": str(settings.remote or ""),
            "workers": self._parts.pools.as_json(),
            "policy": self._parts.policy.as_json(),
            "counters": self._parts.counters.as_json(),
        }
        reply(document)

    def _settings(self, _client: Client, _request: dict[str, Any], reply: Reply) -> None:
        """Gives the settings as on its command line, which the kernel shows to everybody."""
        reply({"arguments": self._parts.settings.arguments()})

    def _stop(self, client: Client, _request: dict[str, Any], reply: Reply) -> None:
        self._parts.registry.set_closing()
        self._parts.pairing.shared.closing = True
        self._stop_loop()
        reply({"stopping": True, "pid": os.getpid()})

    def _list_arenas(self, client: Client, request: dict[str, Any], reply: Reply) -> None:
        """One page of the arenas, with their descriptors: the command reads them itself, at its own pace and cost."""
        after = _after(request)
        visible = (arena for arena in self._parts.table.arenas.values() if self._parts.users.sees(client, arena))
        later = sorted((a for a in visible if a.sequence > after), key=lambda arena: arena.sequence)
        page = later[: limits.CONTROL_FDS_PER_PIECE]
        document = {
            "arenas": [arena.arena_id.hex() for arena in page],
            "pids": [arena.pid for arena in page],
            "pid_namespace": pid_namespace_of(Path("/proc/self")),
            "next": page[-1].sequence if len(later) > len(page) else None,
        }
        reply(document, [arena.fd for arena in page])

    def _list_ended(self, client: Client, request: dict[str, Any], reply: Reply) -> None:
        reply(self._parts.table.history.page(_after(request), partial(self._parts.users.sees_user, client)))

    def _list_links(self, client: Client, request: dict[str, Any], reply: Reply) -> None:
        """One page of the connections with other hosts: those carried here, each worker's, the protocols' own."""
        after = _after(request, _LINKS_OF_ONE * (limits.WORKERS_MAX + 2))
        place, begin = divmod(after, _LINKS_OF_ONE)
        slots = self._parts.pools.slots

        def show(rows: list[Row], more: bool) -> None:
            later = after + len(rows) if more else (place + 1) * _LINKS_OF_ONE if place <= len(slots) else None
            page = [details for uid, details in rows if self._parts.users.sees_user(client, uid)]
            reply({"links": page, "next": later})

        if not place:
            show(*self._parts.hub.links(begin))
        elif place <= len(slots):
            slots[place - 1].show(begin, show)
        elif self._parts.settings.remote is None:
            show([], False)
        else:
            own = chain.from_iterable(each.links() for each in self._parts.protocols.each())
            show(*page(islice(own, begin, None)))

    def _list_modules(self, client: Client, _request: dict[str, Any], reply: Reply) -> None:
        found = [one.as_json(kind) for kind, modules in self._modules().items() for one in modules.status()]
        reply({"modules": found})

    def _add_module(self, _client: Client, request: dict[str, Any], reply: Reply) -> None:
        self._kind(request).add(str(request.get("name")))
        self._changed(reply)

    def _remove_module(self, _client: Client, request: dict[str, Any], reply: Reply) -> None:
        """Removes a module. Connections to other hosts need a protocol until they are on TCP, so they leave first."""
        modules, name, hub, pools = self._kind(request), str(request.get("name")), self._parts.hub, self._parts.pools
        is_protocol, deadline = modules is self._parts.protocols, self._parts.loop.now + limits.RELAY_LEAVE_S
        if is_protocol:
            hub.leave(name)
            hub.refused.add(name)
            pools.leave(name)

        def remove() -> None:
            carries = any(one.protocol == name for one in hub)
            waits = (carries and not hub.settled(name)) or not pools.settled(name)
            if waits and self._parts.loop.now < deadline:
                self._parts.loop.call_later(limits.RELAY_LEAVE_LOOK_S, remove)
                return
            hub.refused.discard(name)
            try:
                modules.remove(name)
            except Unavailable as error:
                reply(_refusal(error))
                return
            self._changed(reply)
            if is_protocol:
                hub.cut_off(name)
                hub.leave(name)

        remove()

    def _kind(self, request: dict[str, Any]) -> Protocols | Transports:
        modules = self._modules().get(str(request.get("kind", "protocol")))
        if modules is None:
            raise Misuse(f"unknown kind of module; known: {sorted(self._modules())}")
        return modules

    def _changed(self, reply: Reply) -> None:
        """Modules have."""
        self._parts.follow_policy()
        reply({"done": True})

    def _decide(self, client: Client, request: dict[str, Any], reply: Reply) -> None:
        """A dry run: what would become of a connection."""
        try:
            endpoint = Endpoint(ip_address(request["address"]), int(request["port"]))
            role = Role(request["role"])
            uid = int(request.get("uid", client.uid))
            subject = Subject((str(request["program"]),), uid, frozenset(map(int, request.get("gids", ()))))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise Misuse(f"not a connection: {error!r}") from error
        if role is Role.CONNECT:
            verdict = self._parts.decisions.connect(subject, Request(None, endpoint, None), dry=True)
        else:
            verdict = self._parts.decisions.would_listen(subject, endpoint)
        carrier, paths = verdict.protocol, self._parts.settings.proof is Proof.PATH
        within = carrier is not None and not carrier.capabilities.remote and not paths
        reply(verdict.as_json() | {"within_namespace": within})

    def _list_decisions(self, client: Client, request: dict[str, Any], reply: Reply) -> None:
        after = _after(request)
        reply(self._parts.decisions.trace(after, shown=partial(self._parts.users.sees_user, client)))

    def _give_order(self, client: Client, request: dict[str, Any], reply: Reply) -> None:
        kind = commands.OPERATIONS[request["op"]]
        answer = commands.give(
            kind, client, request, arenas=self._parts.table.arenas, clients=self._parts.table.clients,
            registry=self._parts.registry, sees=self._parts.users.sees,
        )  # fmt: skip
        self._parts.counters.add("order_passed" if answer["told"] else "order_refused", str(answer["passed"]))
        reply(answer)

    _KNOWN: Final[dict[str, Callable[[Operations, Client, dict[str, Any], Reply], None]]] = {
        "status": _status,
        "settings": _settings,
        "stop": _stop,
        "arenas": _list_arenas,
        "ended": _list_ended,
        "links": _list_links,
        "modules": _list_modules,
        "module_add": _add_module,
        "module_remove": _remove_module,
        "decide": _decide,
        "trace": _list_decisions,
        "demote": _give_order,
        "promote": _give_order,
    }


def _refusal(error: SidestepError) -> dict[str, Any]:
    return {"error": error.message} | ({"remedy": error.remedy} if error.remedy else {})


def _after(request: dict[str, Any], end: int | None = None) -> int:
    """Number behind which a page begins."""
    after = request.get("after", 0)
    if not isinstance(after, int) or (end is not None and not 0 <= after < end):
        raise Misuse("'after' is not a number")
    return after
