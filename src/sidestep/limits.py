"""Every bound of the Python side: its unit, its reason, and what happens there."""

from __future__ import annotations

from typing import Final

# Channels. The C side checks the same numbers (channel.h); a test compares them.
CHANNEL_HEADER_SIZE: Final = 4096  # bytes before the rings of a segment
RING_SIZE_MIN: Final = 4096  # bytes a direction: a page; who offers less is dropped: client_dropped{malformed}
RING_SIZE_MAX: Final = 64 << 20  # bytes a direction: beyond it a ring only wastes cache; client_dropped{malformed}
RING_SIZE_DEFAULT: Final = 256 << 10  # bytes a direction: about what kernel TCP keeps in flight on loopback

# Clients of the provider.
CLIENTS_MAX: Final = 4096  # connections, one per process; the next one is closed at once: client_dropped{too_many}
HELLO_TIMEOUT_S: Final = 5.0  # seconds a connection may stay silent before its HELLO: client_dropped{silent}
MESSAGES_PER_TURN: Final = 32  # read from one client before the others have their turn
FDS_PER_MESSAGE: Final = 3  # an OFFER brings three; what exceeds it the kernel closes, and the client is dropped
CLIENT_SEND_BUFFER: Final = 1 << 20  # bytes asked of the kernel; a client that lets it fill up is dropped
ARENA_SIZE_MAX: Final = 64 << 20  # bytes of address space per process family; a larger arena is refused

# Offers.
OFFERS_PENDING_MAX: Final = 256  # per client; the next one is refused with TOO_MANY
OFFERS_TOTAL_MAX: Final = 4096  # of all clients, three descriptors each; the next one is refused with TOO_MANY
OFFER_EXPIRY_S: Final = 2.0  # seconds; then the other end is idle or not under sidestep: refused with EXPIRED
DESCRIPTORS_SPARE: Final = 64  # descriptors the provider keeps for itself when it sizes the two limits above

# Control connections (the commands).
CONTROL_REQUEST_MAX: Final = 4096  # bytes of JSON in a request; longer: client_dropped{malformed}
CONTROL_PIECE_MAX: Final = 32 << 10  # bytes of JSON in one packet of a reply
CONTROL_FDS_PER_PIECE: Final = 32  # arena descriptors in one packet of a reply: few enough for any command
CONTROL_REPLY_TIMEOUT_S: Final = 10.0  # seconds a command waits for the provider

# The provider as a process.
IDLE_EXIT_S: Final = 300.0  # seconds without clients until it leaves
START_TIMEOUT_S: Final = 10.0  # seconds `provider start` waits for it to listen
STOP_TIMEOUT_S: Final = 5.0  # seconds `provider stop` waits for it to go
LOG_LINES_MAX: Final = 1000  # lines a provider writes to its log; then it says so and falls silent
