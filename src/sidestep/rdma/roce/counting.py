"""What a software HCA counts, and by which names it is told."""

from __future__ import annotations

from typing import Final

EVENTS: Final = {
    "packets_sent": "packets sent",
    "packets_received": "packets taken in",
    "packet_dropped": "packets that came and were dropped, by reason",
    "packet_unsent": "packets that the kernel did not send, by errno",
    "mad_dropped": "messages of the connection manager that came, or were to be sent, and were dropped, by reason",
    "request_rejected": "requests of others that were refused here, by reason",
    "connection_made": "connections established, by who asked: this end (active) or the other one (passive)",
}
