/* shim_slot.c - the two directions of a connection move from state to state. */
#include "shim.h"

/*
 * The move of a state, under the lock of the direction. A move that is not in the table would be a fault of ours: then
 * nothing moves.
 */
static void state_move(_Atomic uint32_t *state, uint8_t next, const char *way, unsigned event)
{
	if (likely(next != 0xff)) {
		atomic_store(state, next); /* full fence */
		return;
	}
	shim_log("%s state %u knows no event %u", way, word_load(*state), event);
	if (getenv("SIDESTEP_CHECKED")) /* set by the tests */
		abort();
}

void tx_move(struct conn_slot *slot, enum tx_event_code event)
{
	static const uint8_t next[TX_STATES][TX_EVENTS] = TX_NEXT;
	uint32_t state = word_load(slot->tx_state);

	state_move(&slot->tx_state, state < TX_STATES ? next[state][event] : 0xff, "tx", event);
}

void rx_move(struct conn_slot *slot, enum rx_event_code event)
{
	static const uint8_t next[RX_STATES][RX_EVENTS] = RX_NEXT;
	uint32_t state = word_load(slot->rx_state);

	state_move(&slot->rx_state, state < RX_STATES ? next[state][event] : 0xff, "rx", event);
}
