/* provider.c - see provider.h. Speaks the records of layout.py and nothing else. */
#include "provider.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "channel.h"
#include "layout.h"
#include "relay.h"
#include "sim.h"

static struct object *registry;
static struct {
	bool made;
	int end;
	struct rpc_msg record;
	struct object *files[8];
} offer;
static struct object *arenas[2], *segments[2];
static int places[2];
bool provider_relays;
static struct {
	uint8_t arena[16], family[16];
} own_arenas[ENDS], joined[ENDS]; /* of each process; of another family whose connection it holds */

static uint32_t *registry_word(size_t offset)
{
	return (uint32_t *)(registry->memory + offset);
}

static void answer(int end, struct rpc_msg record, struct object *const *files, int files_len)
{
	record.magic = RPC_MAGIC;
	record.version = LAYOUT_VERSION;
	if (!provider_lines[end])
		return;
	line_send(provider_lines[end], &record, sizeof(record), files, files_len);
	/* `answers`, the second word behind `commands`, where there is one */
	++*registry_word(offsetof(struct registry_header, commands) + 8);
}

static void refuse(int end, uint64_t token, uint32_t reason)
{
	trace("    provider: refuses end %d: %u", end, reason);
	answer(end, (struct rpc_msg){.type = RPC_REFUSED, .token = token, .reason = reason}, NULL, 0);
}

static void bucket_set(bool offered)
{
	static uint32_t generation;

	if (!registry)
		return;
	generation += offered;
	/* there is one connection: whatever its bucket is, it is told */
	for (uint32_t i = 0; i < REGISTRY_BUCKETS; i++)
		*registry_word(REGISTRY_BUCKETS_OFFSET + 4 * i) = generation << 8 | (offered ? 1 : 0);
}

static void offer_drop(void)
{
	if (!offer.made)
		return;
	offer.made = false;
	bucket_set(false);
	for (int i = 0; i < 3; i++)
		object_put(offer.files[i]);
}

static void welcome(int end, struct message *message)
{
	if (!registry) {
		registry = object_new(KIND_MEMORY);
		registry->refs++;
		registry->len = REGISTRY_SIZE;
		registry->memory = calloc(1, REGISTRY_SIZE);
		registry->seals = 0xf;
		registry->shared = true;
		struct registry_header *header = (struct registry_header *)registry->memory;
		header->magic = RPC_MAGIC;
		header->version = LAYOUT_VERSION;
		header->secret = 5;
	}
	if (message->files_len == 1 && !provider_slot(end & 1)) { /* else another program of this end has come */
		arenas[end & 1] = message->files[0];
		arenas[end & 1]->refs++;
	}
	answer(end,
	       (struct rpc_msg){.type = RPC_WELCOME,
	                        .flags = WELCOME_SERVES | WELCOME_NEW_DOORBELLS | WELCOME_JOINS,
	                        .promote_after_calls = 16,
	                        .promote_after_bytes = 65536},
	       &registry, 1);
}

static struct object *memory_new(size_t len)
{
	struct object *object = object_new(KIND_MEMORY);

	object->refs++;
	object->len = len;
	object->memory = calloc(1, len);
	object->seals = 0x6; /* F_SEAL_SHRINK, F_SEAL_GROW */
	object->shared = true;
	return object;
}

/* The claimer's channel is with the provider, as the offerer's is: each of them has a segment. */
static void stand_between(int end, struct rpc_msg *attach, struct rpc_msg *told, const struct rpc_msg *claim,
                          struct message *message)
{
	struct object *offered = offer.files[0], *second = memory_new(offered->len);
	struct relay_app apps[2];
	int mine = offer.end & 1, theirs = end & 1;

	memcpy(second->memory, offered->memory, offsetof(struct channel_segment, pad));
	segments[theirs] = second;
	apps[mine] = (struct relay_app){offer.files[1], offer.files[2], offer.record.doorbell_index};
	apps[theirs] = (struct relay_app){message->files[0], message->files[1], claim->doorbell_index};
	if (!relay_liveness) {
		relay_liveness = object_new(KIND_LIVENESS);
		relay_liveness->refs++;
		relay_doorbell = object_new(KIND_DOORBELL);
		relay_doorbell->refs++;
		relay_doorbell->count = 1ull << 62;
		relay_page = memory_new(4096);
	}
	relay_open(segments, places, apps);
	attach->flags = told->flags = ATTACH_RELAYED;
	memset(attach->doorbell_page_id, 7, sizeof(attach->doorbell_page_id));
	memset(told->doorbell_page_id, 7, sizeof(told->doorbell_page_id));
	attach->doorbell_index = told->doorbell_index = 0;
	answer(end, *attach, (struct object *const[]){second, relay_doorbell, relay_page, relay_liveness}, 4);
	answer(offer.end, *told, (struct object *const[]){relay_doorbell, relay_page, relay_liveness}, 3);
}

static void claimed(int end, const struct rpc_msg *claim, struct message *message)
{
	if (!offer.made || !((end ^ offer.end) & 1)) {
		refuse(end, claim->token, REFUSAL_NO_OFFER);
		return;
	}
	struct rpc_msg attach = offer.record, told = *claim;
	attach.type = RPC_ATTACH;
	attach.token = claim->token;
	attach.flags = 0;
	told.type = RPC_CLAIMED;
	told.token = offer.record.token;
	told.flags = 0;
	memcpy(told.segment_id, offer.record.segment_id, sizeof(told.segment_id));
	trace("    provider: pairs");
	offer.files[0]->refs++;
	segments[0] = segments[1] = offer.files[0];
	places[offer.end & 1] = 0;
	places[end & 1] = 1;
	if (provider_relays) {
		stand_between(end, &attach, &told, claim, message);
	} else {
		answer(end, attach, offer.files, 3);
		answer(offer.end, told, message->files, 2);
	}
	offer_drop();
}

/* To all of a family. */
static void command(int end, struct rpc_msg record, struct object *const *files, int files_len)
{
	if (!registry)
		return;
	++*registry_word(offsetof(struct registry_header, commands));
	for (int i = end & 1; i < ENDS; i += 2)
		if (provider_lines[i] && !provider_lines[i]->line.hung_up)
			answer(i, record, files, files_len);
	++*registry_word(offsetof(struct registry_header, commands));
}

/* By the name that the family's peers know, and that each process has for its arena. */
static void bell_passed(const struct rpc_msg *record, struct object *const *files)
{
	struct rpc_msg told = *record;

	if (!registry)
		return;
	++*registry_word(offsetof(struct registry_header, commands));
	for (int i = 0; i < ENDS; i++) {
		bool is_own = memcmp(own_arenas[i].family, record->arena_id, 16) == 0;
		if (!provider_lines[i] || provider_lines[i]->line.hung_up ||
		    (!is_own && memcmp(joined[i].family, record->arena_id, 16) != 0))
			continue;
		memcpy(told.arena_id, is_own ? own_arenas[i].arena : joined[i].arena, 16);
		answer(i, told, files, 2);
	}
	++*registry_word(offsetof(struct registry_header, commands));
}

static void nonce_named(int end, const struct rpc_msg *record, struct message *message)
{
	if (message->files_len != 2)
		fail("a doorbell of %d files", message->files_len);
	if (provider_relays && segments[0] != segments[1])
		relay_hears_bell(end & 1, (struct relay_app){message->files[0], message->files[1], record->doorbell_index},
		                 record->cookie, record->flags & DOORBELLS_ALONE);
	else
		bell_passed(record, message->files);
}

bool provider_can(int end)
{
	return provider_lines[end] && provider_lines[end]->line.to_driver;
}

void provider_move(int end)
{
	struct line *line = &provider_lines[end]->line;
	struct message *message = line->to_driver;
	struct rpc_msg record;

	line->to_driver = message->next;
	memcpy(&record, message->data, sizeof(record));
	trace("    provider: end %d says %u", end, record.type);
	switch (record.type) {
	case RPC_HELLO:
		memcpy(own_arenas[end].arena, record.arena_id, 16);
		memcpy(own_arenas[end].family, record.segment_id, 16);
		welcome(end, message);
		break;
	case RPC_OFFER:
		if (offer.made) {
			refuse(end, record.token, REFUSAL_EXPIRED);
			break;
		}
		offer.made = true;
		offer.end = end;
		offer.record = record;
		for (int i = 0; i < 3; i++) {
			offer.files[i] = message->files[i];
			offer.files[i]->refs++;
		}
		bucket_set(true);
		break;
	case RPC_CLAIM: claimed(end, &record, message); break;
	case RPC_WITHDRAW: offer_drop(); break;
	case RPC_NEW_DOORBELL: nonce_named(end, &record, message); break;
	case RPC_SERVE: command(1 - (end & 1), record, NULL, 0); break;
	case RPC_JOIN:
		memcpy(joined[end].arena, record.arena_id, 16);
		memcpy(joined[end].family, record.segment_id, 16);
		break;
	case RPC_LEAVE: memset(&joined[end], 0, sizeof(joined[end])); break;
	default: fail("the provider does not know message %u", record.type);
	}
	for (int i = 0; i < message->files_len; i++)
		object_put(message->files[i]);
	free(message);
}

const struct conn_slot *provider_slot(int end)
{
	const struct arena_header *header = arenas[end] ? (const struct arena_header *)arenas[end]->memory : NULL;
	const struct conn_slot *slot = header ? (const struct conn_slot *)(arenas[end]->memory + ARENA_SLOTS_OFFSET) : NULL;

	return slot && (slot->generation & 1) ? slot : NULL; /* the first, as there is one connection */
}

void provider_dies(void)
{
	trace("    provider: dies");
	relay_dies();
	offer_drop();
	registry = NULL; /* the page stays mapped, and nobody writes it any more */
	for (int i = 0; i < ENDS; i++)
		if (provider_lines[i]) {
			line_end(provider_lines[i]);
			provider_lines[i] = NULL;
		}
}

struct channel_segment *provider_segment(int side, int *place)
{
	*place = places[side];
	return segments[side] ? (struct channel_segment *)segments[side]->memory : NULL;
}

void provider_order(int end, bool promote)
{
	const struct conn_slot *slot = provider_slot(end);

	if (!slot || !registry)
		return;
	trace("    provider: end %d is to %s", end, promote ? "promote" : "demote");
	struct rpc_msg record = {.type = promote ? RPC_PROMOTE : RPC_DEMOTE, .token = slot->generation};
	memcpy(record.arena_id, ((const struct arena_header *)arenas[end & 1]->memory)->arena_id, 16);
	command(end, record, NULL, 0);
}
