"""Every bound of the Python side: its unit, its reason, and what happens there."""

from __future__ import annotations

from typing import Final

# Channels. The C side checks the same numbers (channel.h); a test compares them.
CHANNEL_HEADER_SIZE: Final = 4096  # bytes before the rings of a segment
RING_SIZE_MIN: Final = 4096  # bytes a direction: a page; a client that offers less goes: client_dropped{malformed}
RING_SIZE_MAX: Final = 64 << 20  # bytes a direction: beyond it a ring only wastes cache; client_dropped{malformed}
RING_SIZE_DEFAULT: Final = 256 << 10  # bytes a direction: about what kernel TCP keeps in flight on loopback
RING_SIZE_REMOTE: Final = 1 << 20  # the same with another host, where bytes stay until they are read; if none is given

# Clients of the provider.
CLIENTS_MAX: Final = 4096  # connections, one per process; the next one is closed at once: client_dropped{too_many}
HELLO_TIMEOUT_S: Final = 5.0  # seconds a connection may stay silent before its HELLO: client_dropped{silent}
MESSAGES_PER_TURN: Final = 32  # read from one client before the others have their turn
FDS_PER_MESSAGE: Final = 5  # an OFFER brings three, and two as proof; more the kernel closes: client_dropped{malformed}
CLIENT_SEND_BUFFER: Final = 1 << 20  # bytes asked of the kernel; a client that lets it fill up is dropped
GUEST_ARENAS_MAX: Final = 16  # families of which a program may hold connections that it was given
ARENA_SIZE_MAX: Final = 64 << 20  # bytes of address space per process family; a larger arena is refused

# Offers.
OFFERS_PENDING_MAX: Final = 256  # per client; the next one is refused with TOO_MANY
OFFERS_TOTAL_MAX: Final = 4096  # offers of all clients, four descriptors each; the next one is refused with TOO_MANY
OFFER_EXPIRY_S: Final = 2.0  # seconds; then the other end is idle or not under sidestep: refused with EXPIRED
DESCRIPTORS_SPARE: Final = 64  # descriptors the provider keeps for itself when it sizes the two limits above

ENDS_OFFERED_MAX: Final = 8  # offers with equal addresses in different namespaces; the next: offer_refused{TOO_MANY}

# Other users, and other network namespaces: a system-wide provider.
USER_SHARE: Final = 4  # one user has at most a quarter of the clients, offers and channel memory; root may have all
LINEAGE_MAX: Final = 1024  # processes known to come from root, a descriptor each; the oldest is forgotten
PATH_PROOF_S: Final = 0.5  # seconds for a datagram each way between two namespaces: then claim_refused{NOT_PROVEN}
PATH_PROOFS_MAX: Final = 512  # proofs under way at a time; the next claim is refused with TOO_MANY
PATH_PROOFS_PER_USER_MAX: Final = 128  # proofs that one user asks for at a time; likewise

# Control connections (the commands).
CONTROL_REQUEST_MAX: Final = 4096  # bytes of JSON in a request; longer: client_dropped{malformed}
CONTROL_PIECE_MAX: Final = 32 << 10  # bytes of JSON in one packet of a reply
CONTROL_FDS_PER_PIECE: Final = 32  # arena descriptors in one packet of a reply: few enough for any command
CONTROL_REPLY_TIMEOUT_S: Final = 10.0  # seconds a command waits for the provider
ORDERS_SHARE: Final = 0.5  # part of the kernel's queue for a client that does not read; then it is busy for orders
ORDERS_PER_REQUEST: Final = 128  # connections in one request to demote or promote; the command asks again
ENDED_MAX: Final = 1000  # connections of ended programs that a provider remembers; the oldest are forgotten
ENDED_PER_FAMILY_MAX: Final = 250  # connections of one process family among these; others in its later places are lost
ENDED_PER_REPLY: Final = 24  # connections in one packet of a reply: a KiB each
ENDED_NAME_MAX: Final = 64  # characters of the program's name that are kept
ORDER_TIMEOUT_S: Final = 5.0  # seconds `demote` and `promote` wait for the programs by default

# Metrics.
METRICS_REQUESTS_MAX: Final = 16  # requests served at a time, a thread each; the next connection is closed at once
LINK_PEERS_MAX: Final = 256  # other hosts that metrics have series for; all more are counted as one, "others"
METRICS_REQUEST_TIMEOUT_S: Final = 5.0  # seconds a scraper may keep its request or its reading waiting; then it is cut

# The provider as a process.
IDLE_EXIT_S: Final = 300.0  # seconds without clients until it leaves
START_TIMEOUT_S: Final = 30.0  # seconds `provider start` waits for it to listen; a crowded CPU can make it take ten
STOP_TIMEOUT_S: Final = 5.0  # seconds `provider stop` waits for it to go
HELD_UP_S: Final = 0.02  # seconds until a timer ends a call of the kernel's that waits: a close() that lingers
LOG_LINES_MAX: Final = 200  # lines a minute in a provider's log, for each client, each module and itself
LOG_FILE_MAX: Final = 16 << 20  # bytes of the log of a provider in the background; then it begins anew
LOG_MINUTE_S: Final = 60.0  # seconds until a log that was full goes on, with the number of lines left out

# Decisions.
TRACE_DECISIONS_MAX: Final = 4096  # kept for `sidestep policy trace`; the oldest are forgotten
TRACE_DECISIONS_PER_REPLY: Final = 32  # entries in one packet of a reply; the command asks again
LINKS_PER_REPLY: Final = 32  # entries in one packet of a reply; the command asks again
TRACE_BYTES_PER_REPLY: Final = 16 << 10  # bytes of JSON of them all but the last; likewise
WHY_MAX: Final = 1024  # characters of a reason, which may be a module's own words; a longer one is cut
TRACE_POLL_S: Final = 0.2  # seconds between two questions of `sidestep policy trace` when nothing is new
COMMAND_NAME_MAX: Final = 4096  # bytes of a program's first word that are looked at
PEER_GROUPS_MAX: Final = 256  # supplementary groups of a client; with more only its effective one counts

# Connections through the provider.
RELAYS_MAX: Final = 1024  # connections of one process, as far as descriptors allow; more stay on TCP: PROTOCOL_FAILED
RELAY_DESCRIPTORS: Final = 8  # descriptors that a connection may cost: two doorbells, and those of its protocol
RELAY_DOORBELLS_MAX: Final = 16  # doorbells of one end, each of another program; beyond: relay_reset{doorbell}
RELAY_ATTACH_S: Final = 10.0  # seconds for the ends here to attach: relay_dropped{not_attached}
RELAY_CHECK_S: Final = 0.1  # seconds after the end of a client until the kernel is asked about its connections
RELAY_CHECK_MAX_S: Final = 60.0  # seconds, at most, between two such questions, while another process holds one
RELAY_LEAVE_S: Final = 4.0  # seconds a stopping provider waits until all is on TCP; what is on its way then is reset
RELAY_LEAVE_LOOK_S: Final = 0.02  # seconds between two looks whether all is on TCP
RELAY_TIDY_S: Final = 10.0  # seconds after the end of a connection until the memory of all that ended is freed
REMOTE_SOUGHT_MAX: Final = 1024  # accepting ends that other hosts look for and no program has claimed yet
REMOTE_SOUGHT_S: Final = 5.0  # seconds until such an end counts as absent
WORKERS_MAX: Final = 64  # processes that carry connections with other hosts; more are a misuse
WORKER_PAUSE_S: Final = 0.1  # seconds until a worker that has died is started anew; doubled each time
WORKER_PAUSE_MAX_S: Final = 30.0  # seconds, to which WORKER_PAUSE_S grows at most
WORKER_LIVED_S: Final = 60.0  # seconds that a worker has to live for the pause to begin at WORKER_PAUSE_S again
WORKER_QUEUE_MAX: Final = 4096  # messages that wait for a worker, or for its provider; beyond: the two part
WORKER_QUEUE_LOOK_S: Final = 0.002  # seconds between two tries to send what waits
WORKER_TEXT_MAX: Final = 64 << 10  # bytes of text in one message between the two
WORKER_END_S: Final = 0.5  # seconds an ending provider waits for its workers, once they had time to leave
WORKER_ASKED_S: Final = 1.0  # seconds for a worker to list its connections; else it is left out
WORKER_TICKET_S: Final = 2.0  # seconds for which a port that another host got counts as a connection
REMOTE_ADDRESSES_MAX: Final = 64  # addresses of this host from which connections with others are carried
PEERS_KNOWN_MAX: Final = 4096  # hosts whose answer is remembered; the oldest is forgotten
PEERS_ASKING_MAX: Final = 256  # hosts that are asked at a time; connections to others stay on TCP
PEERS_WAITING_MAX: Final = 1024  # connections that wait for the answer of one host
PEER_TRIES: Final = 3  # requests without an answer; then the host is taken for absent
PEER_ANSWER_S: Final = 0.25  # seconds until the next request
PEER_ABSENT_S: Final = 60.0  # seconds for which a host that refused, or did not answer, is not asked
PEER_PORT_S: Final = 240.0  # seconds for which our own answer, the port of this provider, may be used
PEER_KNOWN_MAX_S: Final = 300.0  # seconds for which an answer is believed at most
POLL_MIN_S: Final = 10e-6  # seconds that a provider looks on before it sleeps, after news of a link, at least
POLL_MAX_S: Final = 200e-6  # seconds, the same at most
POLL_LOAD_S: Final = 5e-3  # seconds between two looks whether others want its processor
SETTLE_S: Final = 900.0  # seconds for which two providers try to agree about a connection whose link has broken
SETTLE_LOOK_S: Final = 1.0  # seconds between two looks whether TCP has been reset meanwhile
SETTLE_ENDED_S: Final = 12.0  # the same, and for the answer about an end, once TCP has ended; requests may be lost
SETTLED_KEPT_S: Final = 60.0  # seconds for which the answer is kept, in case it was lost
SETTLED_MAX: Final = 4096  # answers that are kept; the oldest goes
VISITS_REMEMBERED_MAX: Final = 65536  # names of an address that are refused a second time; the oldest is forgotten
REMOTE_RECEIVES: Final = 16  # private buffers of a connection with another host
REMOTE_RECEIVES_PINNED: Final = 12  # the same over a device that pins them: 13 pages; a thousand connections, 51 MiB
REMOTE_RECEIVE_SIZE: Final = (4 << 10) + 16  # bytes of each at first, header included
REMOTE_RECEIVE_SIZE_MAX: Final = 60 << 10  # bytes, once more is sent than they hold; fits one IP packet of a capture
REMOTE_PRIVATE_BYTES: Final = 512 << 20  # bytes of all private buffers, at one address; connections beyond stay on TCP
REMOTE_PINNED_BYTES: Final = 512 << 20  # bytes that kernel devices pin by default; connections beyond stay on TCP
REMOTE_DATA_SHARE: Final = 4  # data under way has at most a quarter of that registered; more is copied
REMOTE_RESTED_S: Final = 2.0  # seconds in which a connection moves nothing, until its place may go to another one
CONTROL_LINKS_MAX: Final = 1024  # links with other providers that this one made, and as many that they made
CONTROL_CONNECTIONS_MAX: Final = 16384  # connections that one of them asks for at a time; more are rejected
CONTROL_RECORDS_MAX: Final = 4096  # records on their way to another provider; beyond that the link is closed
CONTROL_POOL_MAX: Final = 8  # queue pairs that one host asks another to join with, for connections to come; no more
CONTROL_POOL_ALL_MAX: Final = 64  # queue pairs of a device, for either end; beyond that connections join their own
CONTROL_POOL_DELAY_S: Final = 0.02  # seconds until the next one is joined, as the connection before it has things to do
CONTROL_POOL_KEPT_S: Final = 30.0  # seconds without a new connection; then the queue pairs are destroyed
CONTROL_TIMEWAIT_S: Final = 1.0  # late packets of a queue pair may still come; then its number is used again
LINK_WORDS_MAX: Final = 256  # words to another host that wait: beyond half no data, beyond: relay_reset{violation}
LINK_FINISH_S: Final = 2.0  # seconds for which an end of a link that has sent all waits for the other's end
LINK_PIECES_MAX: Final = 32  # pieces of data of one connection on their way to another host; more stay in the ring
LINK_PIECES_BUFFERED: Final = 8  # the same where the engine is to get the connection: it waits for them
LINK_PIECE_MAX: Final = 65536  # bytes of one of these, where the engine is to get the connection: it waits for them

# SDP streams joined with TCP sockets: ordinary SDP requests for a service of this host, and `sidestep gateway`.
PUMP_PIECE: Final = 128 << 10  # bytes read at a time; as many as make an RDMA Read worth its round trip
PUMP_PIECES_MAX: Final = 3  # pieces of one direction of one connection; then nothing is read until one has gone
PUMP_PIECES_KEPT: Final = 64  # free pieces of a process, kept for the next read; more are freed
PUMP_TURN: Final = 256 << 10  # bytes for one connection until the others of the loop have their turn
GATEWAY_RULES_MAX: Final = 256  # rules of one gateway; more are refused
GATEWAY_CONNECTIONS: Final = 256  # connections of one rule at a time by default; more wait
GATEWAY_CONNECTIONS_MAX: Final = 100_000  # connections that a rule may ask for
GATEWAY_CONNECT_S: Final = 10.0  # seconds for the other end to answer; then the next way, or a reset
GATEWAY_DRAIN_S: Final = 30.0  # seconds for connections to end after the gateway's signal; then they are reset
SERVICE_PORTS_MAX: Final = 256  # ports of an address: services that other hosts have asked the port mapper for
SERVICE_PORT_S: Final = 30.0  # seconds for which such a port may be used; 31.75 at most (docs/wire/sdp.md §23.4)
SERVICE_KEPT_S: Final = 45.0  # seconds without a question after which it is released

# SDP in a Python program's own process (`protocol="sdp"`).
API_EXIT_S: Final = 2.0  # seconds that the end of a process waits for connections to end well; then they are cut
API_CANCEL_S: Final = 15.0  # seconds for the other end to agree that a buffer is taken back; then the connection ends
API_WRITE_AHEAD: Final = 32 << 20  # bytes that a writer refers to and the other end has not; then `drain` waits
API_WRITES_AHEAD: Final = 64  # sends of a writer that are outstanding; what is written meanwhile is joined
API_PORT_TRIES: Final = 16  # free ports tried for a listener that wants any; then EADDRINUSE
SERVED_MAX: Final = 1024  # connections of other hosts with listeners of one address; the next one is rejected
SERVICE_CONNECT_S: Final = 1.0  # seconds for a listener of this host to take a connection; then its queue is full
REACHED_MAX: Final = 1024  # connections that begin with SDP, of all users, made or coming; the next: TCP, or ENOBUFS
REACH_S: Final = 10.0  # seconds for the other host to answer; then ETIMEDOUT
REACH_TAKEN_S: Final = 5.0  # seconds until the program's socket has come to the redirect listener; then it is abandoned
REACH_SHUT_S: Final = 60.0  # seconds until a program without an answer stops: after SDP_CONNECT_SYNS of the shim
REACH_WAIT_MAX_S: Final = 2.0  # seconds, at most, that a call waits for a verdict, with any timeout of its own
REACH_UNANSWERED_S: Final = 30.0  # seconds for which TCP comes first at a place where SDP has failed
REACH_UNANSWERED_MAX: Final = 4096  # places; the oldest is tried again
NAMES_PAST_MAX: Final = 1024  # addresses of connections that are over, for late questions; the oldest go
LISTENERS_KNOWN_MAX: Final = 256  # listening sockets whose program is remembered; the oldest is looked up again

# Policy. What exceeds a bound is a problem of the file: the policy before it stays in force.
POLICY_RULES_MAX: Final = 20_000  # statements of a place and what it includes; later ones are not read
POLICY_BYTES_MAX: Final = 4 << 20  # bytes of a place and what it includes; a file beyond it is not read
POLICY_FILES_MAX: Final = 256  # files that a place includes; the next one is not read
POLICY_INCLUDE_DEPTH_MAX: Final = 8  # files that include each other; the next one is not read
POLICY_LINE_MAX: Final = 1024  # characters of a statement; comments may be longer
POLICY_NAME_MAX: Final = 255  # characters of a program, a user, a group or a file, as in the kernel's NAME_MAX
POLICY_PROTOCOL_MAX: Final = 32  # characters of a protocol's name
POLICY_PROBLEMS_MAX: Final = 100  # problems reported for a file; then it is read no further
POLICY_SUBJECTS_CACHED: Final = 1024  # programs by user whose rules are remembered; the oldest is looked up again
POLICY_WATCHES_MAX: Final = 256  # directories watched for changes; what lies in others is read at the next start
POLICY_LOOKS_MAX: Final = 5  # readings of files that change while they are read; the next change makes an event anyway

# Routes and interfaces.
NETLINK_RECEIVE_BUFFER: Final = 1 << 20  # bytes asked of the kernel; what overflows it is found by comparing snapshots
NETLINK_DATAGRAM_MAX: Final = 64 << 10  # bytes: the kernel's own are 32 KiB at most; a longer one counts as lost
NETLINK_DATAGRAMS_PER_TURN: Final = 64  # notifications read before the provider's clients have their turn
NETWORK_FOLLOWED_MAX: Final = 4096  # interfaces, addresses, routes, of each; with more, losses make a ChangesLost
NETWORK_SNAPSHOTS_MAX: Final = 8  # snapshots in a row while the network changes under them; then a ChangesLost
ROUTES_CACHED_MAX: Final = 4096  # answers of the kernel that are remembered; the oldest is forgotten
ROUTE_CACHE_AGE_S: Final = 1.0  # seconds: the kernel does not announce redirects, expiries and the like
ROUTE_SETTLE_S: Final = 0.05  # seconds after a change in which answers are not remembered: it may only be under way
SYSFS_ENTRIES_MAX: Final = 1024  # devices, ports, or GIDs of a port that are looked at; more are ignored

# Explicit sockets. The C side checks the first two (shim_rpc.c); a test compares them.
EXPLICIT_ASK_TIMEOUT_S: Final = 3.0  # seconds a call waits for the provider's answer; then it goes on as without one
EXPLICIT_NAMED_TIMEOUT_S: Final = 30.0  # the same where a protocol is named, but for connect(): then the call fails
EXPLICIT_BINDS_PER_USER_MAX: Final = 256  # ports held for one user; more are native only; a named protocol: ENOBUFS
EXPLICIT_BINDS_TOTAL_MAX: Final = 1024  # ports held for all users, a descriptor each; the next one as above
ERRNO_END: Final = 4096  # errnos are below: one that a protocol raises beyond it becomes EIO

# Python's sockets, where bytes do not go by ring.
PEEK_COPY_MAX: Final = 256 << 10  # bytes that peek() copies; what lies behind them is seen after consume()
RESERVE_COPY_MAX: Final = 256 << 10  # bytes that reserve() gives at a time; the view says how many there are

# SDP (docs/wire/sdp.md has the clauses).
SDP_BUFFER_SIZE_MIN: Final = 37  # bytes of a private buffer: BSDH, SinkAH and one byte; a smaller offer is refused
SDP_BUFFER_SIZE_MAX: Final = 16 << 20  # bytes we offer; a peer may offer up to 2**31 and is then sent less
SDP_BUFFER_SIZE_DEFAULT: Final = 32784  # bytes: 32 KiB of payload, as SDP stacks have offered since 2006
SDP_RESIZE_MAX: Final = 256 << 10  # bytes a private buffer grows to when a peer asks for more; it gets this much
SDP_BUFFERS_MIN: Final = 5  # a connection, ours: with fewer, credit can run dry, or updates of it never end; Misuse
SDP_BUFFERS_MAX: Final = 4096  # a connection; what one that does not read can pin down
SDP_BUFFERS_DEFAULT: Final = 64  # a connection: the number other stacks post
SDP_SEND_QUEUE_MIN: Final = 8  # work requests: an RDMA Write and the message behind it, and room to make progress
SDP_SENDS_QUEUED_MAX: Final = 4096  # sends of the user, on one connection; the next is LimitReached
SDP_RECEIVES_QUEUED_MAX: Final = 4096  # receives of the user, on one connection; the next is LimitReached
SDP_ADVERT_MAX: Final = 1 << 31  # bytes of one advertisement; more is a violation: advert_length
SDP_URGENT_AHEAD_MAX: Final = 65535  # bytes between OOB_PEND and the urgent byte; the announcement waits until then
SDP_GATHER_MAX: Final = 15  # sends of the user in one message: beyond it the header is no longer what costs
SDP_PRIVATE_BYTES_MAX: Final = 1 << 30  # bytes of private buffers of one device; then new connections wait for some
SDP_SPARE_BUFFERS: Final = 16  # registered buffers of a device that wants it so: for payload that cannot be registered
SDP_CHECKED_MESSAGE_MAX: Final = 64 << 10  # bytes of a message on such a device: what a spare buffer holds
SDP_SIGNAL_EVERY: Final = 32  # unsignaled Sends until one is signaled, so that the send queue is known to move

# RDMA. What a device can do itself is in its attributes.
RDMA_BACKLOG_DEFAULT: Final = 128  # connection requests of a listener not answered yet; the next one is rejected
POOL_WAITERS_MAX: Final = 1024  # requests that wait for a buffer of a pool; the next one gets LimitReached
RDMA_POOL_REGIONS_MAX: Final = 1024  # regions of users' buffers, in use or remembered; then the least recent goes
RDMA_POOL_BYTES_MAX: Final = 1 << 30  # bytes of these: pinned memory on a hardware device; then a request waits
KEYS_MAX: Final = 1 << 22  # keys of a software device, out of 2^24: a guess seldom hits; the next one: LimitReached
FABRIC_EVENTS_PER_RUN: Final = 10_000_000  # events of a loopback fabric; beyond it two ends never end: LimitReached

# InfiniBand's reliable connections over UDP (the software HCA).
ROCE_WINDOW: Final = 256  # packets of a queue pair not acknowledged, Reads' answers too; fewer where buffers are small
ROCE_TURN_PACKETS: Final = 64  # packets that one queue pair sends before the others have their turn
ROCE_TURN_DATAGRAMS: Final = 256  # datagrams of one turn, each way; then other sockets and users have theirs
ROCE_MADS_MAX: Final = 1024  # messages of the connection manager that wait to be sent; the next is dropped, and counted
ROCE_ANSWERED_MAX: Final = 1024  # connection requests done with that a device remembers; the oldest are forgotten
ROCE_RECEIVE_BUFFER: Final = 4 << 20  # bytes asked of the kernel for what came and was not read; it gives less, often

# Messages in several datagrams (the datagram service).
DATAGRAM_MESSAGE_MAX: Final = 64 << 10  # bytes of a message; more is Misuse, and segment_dropped{segment_message}
DATAGRAM_SENDS_MAX: Final = 64  # messages that wait to be sent; the next is LimitReached
DATAGRAM_BUFFERS: Final = 64  # datagrams of a service on their way to the device; more wait
DATAGRAM_RECEIVES: Final = 512  # receives of a service: a device takes in half as many before it serves its users
DATAGRAM_WAYS_MAX: Final = 256  # address handles of a service; then one that is idle goes; if none is: LimitReached
DATAGRAM_REASSEMBLY_BYTES: Final = 4 << 20  # bytes of partial messages; beyond it the heaviest sender loses its oldest
DATAGRAM_REASSEMBLY_S: Final = 2.0  # seconds from the first segment to the last; then message_lost{timeout}
DATAGRAM_DONE_MAX: Final = 4096  # messages done with, remembered lest one comes twice; the oldest are forgotten

# Devices of the kernel (verbs).
VERBS_RESOLVE_S: Final = 5.0  # seconds for rdma_cm to find an address or a route; then Unreachable
VERBS_CONNECT_S: Final = 20.0  # seconds from `connect` to the answer; then Unreachable
VERBS_INLINE_MAX: Final = 256  # inline bytes of a request: copied here where the device copies fewer; more: Misuse
VERBS_INLINE_SLOTS: Final = 256  # requests whose inline bytes share one piece of registered memory; more: another
VERBS_INLINE_ASKED: Final = 220  # bytes asked of a device, as most offer them; what it refuses is asked for in halves
VERBS_GATHER_MAX: Final = 32  # entries of a request, where a device takes more: more is Misuse
VERBS_QUEUE_MIN: Final = 4096  # completions that the device's own queue holds at least; it grows with its queue pairs
VERBS_ENGINE_SENDS: Final = 32  # requests of the engine in a send queue, beside Python's; more wait
VERBS_ENGINE_SLAB: Final = 4 << 20  # bytes that all queue pairs of a domain send from, in the engine; more waits
VERBS_RING_BYTES: Final = 8 << 20  # bytes copied within a second from a ring of an application's: then it is pinned
VERBS_RINGS_BYTES: Final = 16 << 20  # bytes of rings that a device pins; then an idle one makes room, or it is copied
VERBS_RING_REST_S: Final = 2.0  # seconds that nothing goes out from a ring; then it is pinned no more
VERBS_RING_RETRY_S: Final = 2.0  # seconds until a ring is pinned anew, or once it could not be; it is copied meanwhile
VERBS_LOOK_S: Final = 1.0  # seconds for which the addresses that the kernel's RDMA devices report are kept
VERBS_GIDS_MAX: Final = 2047  # addresses of a device's ports, as one call brings them; with more it is not used
VERBS_BATCH: Final = 32  # completions taken from a device at a time
VERBS_BACKLOG: Final = 256  # connection requests that the kernel holds for a listener; it drops the next one
VERBS_DRAIN_TICK_S: Final = 0.005  # seconds until a queue pair in error is looked at again, while work is posted
VERBS_DRAIN_S: Final = 2.0  # seconds for the device to flush; then what is left is flushed here

# iWARP (docs/wire/iwarp.md has the clauses).
IWARP_READS_MAX: Final = 128  # RDMA Reads of a peer held at a time, as Linux siw; a peer that wants more gets these
MPA_REPLY_S: Final = 10.0  # seconds an initiator waits for the Reply, as Linux siw; then the attempt has failed
MPA_REQUEST_S: Final = 5.0  # seconds a responder waits for the Request, as Linux siw; then it closes
MPA_DECISION_S: Final = 8.0  # seconds the responder's user has, before siw gives up; then the Reply rejects
MPA_RTR_S: Final = 10.0  # seconds a responder waits for the ready-to-receive message; then it closes
IWARP_CLOSE_S: Final = 10.0  # seconds for the other end's FIN once ours is out; then RST
IWARP_SILENCE_S: Final = 60.0  # seconds that something may be unacknowledged; then the connection is broken
IWARP_NUDGE_S: Final = 0.02  # seconds after a start-up until siw is made to look again; then ten times as many
IWARP_NUDGES_MAX: Final = 3  # times that it is; then it must by itself
IWARP_HALF_OPEN_MAX: Final = 256  # connections of a device that have sent nothing yet; then the oldest goes
# Bytes of iWARP: framing.h has the same numbers; a test compares them.
FRAMING_CALL_MAX: Final = 256 << 10  # bytes of payload framed in one call; more is a ValueError
FRAMING_WAITING_MAX: Final = 1 << 20  # bytes framed and not written, a direction; a call beyond it is a BufferError
FRAMING_BUFFERS_MAX: Final = 1024  # pieces of memory in one list; more is a ValueError
FRAMING_STAGED_DEFAULT: Final = (256 << 10) + 66064  # bytes, a direction: what a read brings, behind part of an FPDU

# Software RDMA devices, seen from other processes.
RDMA_WATCHERS_MAX: Final = 16  # watchers of one process at a time, captures among them; the next one is turned away
RDMA_ASK_MAX: Final = 4096  # bytes of a question; a longer one, or one that cannot be read, ends the connection
RDMA_ASK_S: Final = 10.0  # seconds for a process to answer; then it is passed over
RDMA_PIECE_MAX: Final = 32 << 10  # bytes of captured payload in one packet to a capture
RDMA_ANSWER_MAX: Final = 8 << 20  # bytes of an answer that are read, and that wait for a slow reader
RDMA_LEFT_OUT_MAX: Final = 1024  # connections that a capture leaves out; at more, or twice as many, those that ended go
RDMA_CAPTURE_WAITING_MAX: Final = 16 << 20  # bytes that wait for one capture; what comes then is lost, and counted

# The tools of `sidestep rdma`. What a client asks of a server is checked against these.
RDMA_TOOL_MESSAGE_MAX: Final = 64 << 20  # bytes of one message; a longer one is refused
RDMA_TOOL_MEMORY_MAX: Final = 512 << 20  # bytes of one conversation at one end; more is refused
RDMA_TOOL_SERVER_MEMORY_MAX: Final = 1 << 30  # bytes of all conversations of one server; more is rejected
RDMA_TOOL_DEPTH_MAX: Final = 128  # messages under way; more are refused
RDMA_TOOL_CLIENTS_MAX: Final = 16  # conversations of one server at a time; the next one is rejected

# Captures that are read. A capture is a file of anybody's: its sizes are not believed.
CAPTURE_FRAME_MAX: Final = 16 << 20  # bytes of a frame; a longer one counts as damage, and reading ends there
CAPTURE_INTERFACES_MAX: Final = 65536  # interfaces of one section of a pcapng file; with more it counts as damaged
CAPTURE_UNPACKED_MAX: Final = 1 << 30  # bytes of a capture that is compressed; reading ends there, with an error
CAPTURE_CONNECTIONS_MAX: Final = 65536  # connections followed at a time; the oldest is forgotten
CAPTURE_MESSAGE_MAX: Final = 64 << 20  # bytes of a message that is put together; a longer one is reported and left out
CAPTURE_HELD_MAX: Final = 256 << 20  # bytes of all messages that are put together at a time; more are left out
CAPTURE_AHEAD_MAX: Final = 16 << 20  # bytes of a TCP direction kept behind a gap; with more the later ones are left out
CAPTURE_HEX_MAX: Final = 16 << 20  # characters of hex that are read; more is refused
