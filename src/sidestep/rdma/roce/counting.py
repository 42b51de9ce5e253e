"""What a software HCA counts, and by which names it is told."""

from __future__ import annotations

from typing import Final

EVENTS: Final = {
    "packets_sent": "packets sent",
    "packets_received": "packets taken in",
    "packets_resent": "of the packets sent, requests that were sent before",
    "packet_dropped": "packets that came and were dropped, by reason; `checksum` is the ICRC",
    "packet_unsent": "packets that the kernel did not send, by errno",
    "nak_sent": "negative acknowledgements sent, by what they say",
    "nak_received": "negative acknowledgements that came, by what they say",
    "mad_dropped": "messages of the connection manager that came, or were to be sent, and were dropped, by reason",
    "request_rejected": "requests of others that were refused here, by reason",
    "connection_made": "connections established, by who asked: this end (active) or the other one (passive)",
}
# What a negative acknowledgement says, by native/wire/rc_qp.h::qp_nak (IBTA 9.7.5.2.8, tables 44 and 46).
NAKS: Final = ("receiver_not_ready", "sequence", "invalid_request", "remote_access", "remote_operation", "other")


class Tally:
    """Packets of one queue pair."""

    __slots__ = ("naks_received", "naks_sent", "packets_received", "packets_resent", "packets_sent", "resent")

    def __init__(self) -> None:
        self.packets_sent = self.packets_received = self.packets_resent = 0
        self.naks_sent = self.naks_received = 0
        self.resent = 0  # times that the requester went back

    def as_json(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in sorted(self.__slots__)}
