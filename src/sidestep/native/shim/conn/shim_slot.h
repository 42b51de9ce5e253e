/*
 * shim_slot.h - what the words of a connection's slot mean: its flags, and where its two directions are.
 *
 * A direction is moved under its lock, by the tables of layout.py. Anybody may look.
 */
#ifndef SIDESTEP_SHIM_SLOT_H
#define SIDESTEP_SHIM_SLOT_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "layout.h"

/* words of a slot or a segment that several threads touch */
#define word_load(word) atomic_load_explicit(&(word), memory_order_relaxed)
#define word_store(word, value) atomic_store_explicit(&(word), (value), memory_order_relaxed)
#define word_add(word, value) atomic_fetch_add_explicit(&(word), (value), memory_order_relaxed)
/* Both ways, by TCP and by ring. */
static inline uint64_t slot_messages(const struct conn_slot *slot)
{
	return word_load(slot->tx_tcp_msgs) + word_load(slot->rx_tcp_msgs) + word_load(slot->tx_ring_msgs) +
	       word_load(slot->rx_ring_msgs);
}

static inline uint64_t slot_bytes(const struct conn_slot *slot)
{
	return word_load(slot->tx_tcp_bytes) + word_load(slot->rx_tcp_bytes) + word_load(slot->tx_ring_bytes) +
	       word_load(slot->rx_ring_bytes);
}

/* A message has come. */
static inline void count_turn(struct conn_slot *slot)
{
	uint64_t sent = word_load(slot->tx_tcp_msgs) + word_load(slot->tx_ring_msgs);

	if (sent != word_load(slot->turn_mark)) { /* two threads at once may count as one */
		word_store(slot->turn_mark, sent);
		word_store(slot->turns, word_load(slot->turns) + 1);
	}
}

/* slot->flags */
enum {
	SLOT_FIN = 1u << 2,        /* the native socket has reported the end */
	SLOT_PEER_GONE = 1u << 3,  /* the peer closed: nobody reads our bytes any more */
	SLOT_RESET = 1u << 4,      /* the connection is dead; error was set when it died */
	SLOT_RD_SHUT = 1u << 5,    /* shutdown(SHUT_RD) here */
	SLOT_WR_SHUT = 1u << 6,    /* shutdown(SHUT_WR) here */
	SLOT_PIN = 1u << 7,        /* never promote again; reason says why */
	SLOT_CONNECTED = 1u << 8,  /* connect() or accept() has been seen */
	SLOT_INQ = 1u << 9,        /* TCP_INQ is set */
	SLOT_ZEROCOPY = 1u << 10,  /* SO_ZEROCOPY is set */
	SLOT_NUMBERS = 1u << 11,   /* we number sends with MSG_ZEROCOPY; see zerocopy_in_kernel() */
	SLOT_INHERITED =
		1u << 12,      /* like SLOT_PIN, until no program that was started holds the socket; see shim_inherited.c */
	SLOT_DEMOTED = 1u << 13,   /* like SLOT_PIN, until a command revokes it */
	SLOT_PASSED = 1u << 14,    /* processes that `holders` does not count may hold the socket */
	SLOT_LEAVES =
		1u << 15, /* waiting threads ignore the ring, and with its last byte all goes by TCP; see conn_leave() */
	SLOT_RESERVED = 1u << 16, /* the room behind the tail is being filled in place; nobody else sends by ring */
	SLOT_CONFINED =
		1u << 17, /* Like SLOT_PIN, until the process that uses the socket uncounted has ended; see shim_sandbox.c */
	SLOT_FIN_OWED = 1u << 18, /* Shut here; recalled bytes go out before the kernel's own end; see tx_resend() */
	SLOT_RELAYED = 1u << 20, /* the channel's other end is a provider; see shim_relayed.c */
	SLOT_TCP_FIN = 1u << 21, /* End of the native socket, with RELAYED; bytes may still be on their way */
	SLOT_TCP_RESET = 1u << 23, /* and the end was a reset, which stays in the kernel until the bytes have arrived */
};
/* SLOT_RELAY_OVER, of layout.py, replaces RELAYED: the provider has left without bytes. The segment's words stand still. */
#define SLOT_STAYS (SLOT_PIN | SLOT_DEMOTED | SLOT_INHERITED | SLOT_CONFINED)

/* slot->error: the kernel has this error still, and its word counts when a call takes it. */
#define ERROR_IN_KERNEL (1u << 16)

static inline uint32_t slot_error(const struct conn_slot *slot)
{
	return word_load(slot->error) & ~ERROR_IN_KERNEL;
}

static inline bool slot_has(const struct conn_slot *slot, uint32_t bits)
{
	return (word_load(slot->flags) & bits) != 0;
}
static inline void slot_set(struct conn_slot *slot, uint32_t bits)
{
	atomic_fetch_or(&slot->flags, bits);
}
static inline void slot_clear(struct conn_slot *slot, uint32_t bits)
{
	atomic_fetch_and(&slot->flags, ~bits);
}

/* ---- where the two directions are: enum tx_code, enum rx_code ---- */
static inline bool tx_is(const struct conn_slot *slot, enum tx_code state)
{
	return word_load(slot->tx_state) == state;
}
/* The program's next bytes go to the ring. */
static inline bool tx_by_ring(const struct conn_slot *slot)
{
	uint32_t state = word_load(slot->tx_state);

	return state == TX_RING || state == TX_ENDED;
}
static inline bool rx_is(const struct conn_slot *slot, enum rx_code state)
{
	return word_load(slot->rx_state) == state;
}
static inline bool rx_by_ring(const struct conn_slot *slot)
{
	return rx_is(slot, RX_RING);
}
static inline bool rx_among(const struct conn_slot *slot, uint32_t states)
{
	return states >> (word_load(slot->rx_state) & 31) & 1;
}
/* No unwatched kernel read or wait may begin. */
static inline bool rx_consented(const struct conn_slot *slot)
{
	return !rx_among(slot, 1u << RX_TCP | 1u << RX_BARRED);
}
/* The peer may be sending by ring, or is just being allowed to. */
static inline bool rx_watches(const struct conn_slot *slot)
{
	return rx_among(slot, 1u << RX_OPENING | 1u << RX_CONSENTED | 1u << RX_RING | 1u << RX_REOPENING);
}
/* The peer has sent by ring, and all that is left comes by TCP, unless we consent anew. */
static inline bool rx_over(const struct conn_slot *slot)
{
	return rx_among(slot, 1u << RX_BACK | 1u << RX_RECALLED | 1u << RX_BARRED);
}
/*
 * Sends with MSG_ZEROCOPY are numbered, and the program gets each number. Until our sending goes to the ring for the first
 * time the kernel does that. From then on we do, by either path.
 */
static inline bool zerocopy_in_kernel(const struct conn_slot *slot)
{
	return word_load(slot->zerocopy_sent) != word_load(slot->zerocopy_reported) && !slot_has(slot, SLOT_NUMBERS);
}
static inline bool zerocopy_unreported(const struct conn_slot *slot)
{
	return word_load(slot->zerocopy_sent) != word_load(slot->zerocopy_reported) && slot_has(slot, SLOT_NUMBERS);
}
void tx_move(struct conn_slot *slot, enum tx_event_code event); /* a full fence */
void rx_move(struct conn_slot *slot, enum rx_event_code event); /* likewise */

#endif
