/* loader_decode_x86_64.c - how long an x86-64 instruction is, and where its parts lie (Intel SDM, volume 2, appendix A). */
#include "loader_decode_x86_64.h"

#if defined(__x86_64__)
#include <string.h>

/*
 * Operands of an opcode. '.': nothing. m: ModRM. M, D: ModRM and an immediate of 1, or of 2 or 4 bytes. b, w, d, e: an
 * immediate of 1, 2, 2 or 4, 3 bytes. o: an address. q: an immediate of 2, 4 or 8 bytes. p: a prefix. R: REX. x: no
 * instruction. All other opcodes are handled below.
 */
/* clang-format off: a table */
static const char one_byte[257] = "mmmmbdxxmmmmbdxE"
								  "mmmmbdxxmmmmbdxx"
								  "mmmmbdpxmmmmbdpx"
								  "mmmmbdpxmmmmbdpx"
								  "RRRRRRRRRRRRRRRR"
								  "................"
								  "xxVmppppdDbM...."
								  "bbbbbbbbbbbbbbbb"
								  "MDxMmmmmmmmmmmmm"
								  "..........x....."
								  "oooo....bd......"
								  "bbbbbbbbqqqqqqqq"
								  "MMw.VVMDe.w..bx."
								  "mmmmxxx.mmmmmmmm"
								  "bbbbbbbbddxb...."
								  "p.pp..FG......mm";
/* clang-format on */
/* clang-format off: a table */
static const char two_bytes[257] = "mmmmx.....x.xm.M"
								   "mmmmmmmmmmmmmmmm"
								   "mmmmxxxxmmmmmmmm"
								   "......x.TxUxxxxx"
								   "mmmmmmmmmmmmmmmm"
								   "mmmmmmmmmmmmmmmm"
								   "mmmmmmmmmmmmmmmm"
								   "MMMMmmm.mmmmmmmm"
								   "dddddddddddddddd"
								   "mmmmmmmmmmmmmmmm"
								   "...mMmxx...mMmmm"
								   "mmmmmmmmmmMmmmmm"
								   "mmMmMMMm........"
								   "mmmmmmmmmmmmmmmm"
								   "mmmmmmmmmmmmmmmm"
								   "mmmmmmmmmmmmmmmm";
/* clang-format on */

struct reader {
	const uint8_t *at, *end;
	struct instruction *found;
	const uint8_t *start;
	bool short_operand, wide, short_address;
};

/* ModRM, SIB and displacement, and `more` bytes. */
static bool modrm(struct reader *reader, unsigned more)
{
	const uint8_t *at = reader->at;

	if (at >= reader->end)
		return false;
	unsigned mod = *at >> 6, rm = *at & 7, length = 1;
	reader->found->modrm = (uint8_t)(at - reader->start);
	if (mod != 3) {
		if (rm == 4) {
			if (at + 1 >= reader->end)
				return false;
			length++;
			if (mod == 0 && (at[1] & 7) == 5)
				length += 4;
		} else if (mod == 0 && rm == 5) {
			length += 4;
			reader->found->relative = true;
		}
		length += mod == 1 ? 1 : mod == 2 ? 4 : 0;
	}
	reader->at += length + more;
	return true;
}

/* VEX and EVEX: the prefix says in which map the opcode is. */
static bool vector(struct reader *reader, uint8_t prefix)
{
	unsigned length = prefix == 0xc5 ? 1 : prefix == 0xc4 ? 2 : 3;

	if (reader->at + length >= reader->end)
		return false;
	unsigned map = prefix == 0xc5 ? 1 : prefix == 0xc4 ? *reader->at & 31 : *reader->at & 7;
	reader->at += length;
	uint8_t opcode = *reader->at++;
	if (map == 1 && opcode == 0x77 && prefix != 0x62)
		return true;
	bool immediate =
		map == 3 ||
		(map == 1 && ((opcode >= 0x70 && opcode <= 0x73) || opcode == 0xc2 || (opcode >= 0xc4 && opcode <= 0xc6)));
	return modrm(reader, immediate ? 1 : 0);
}

static bool after_0f(struct reader *reader)
{
	if (reader->at >= reader->end)
		return false;
	uint8_t opcode = *reader->at++;
	switch (two_bytes[opcode]) {
	case '.': return true;
	case 'm': return modrm(reader, 0);
	case 'M': return modrm(reader, 1);
	case 'd': reader->at += 4; return true;
	case 'T': reader->at++; return modrm(reader, 0); /* 0f 38 */
	case 'U': reader->at++; return modrm(reader, 1); /* 0f 3a */
	}
	return opcode == 0x05 || opcode == 0x07 || opcode == 0x0b; /* syscall, sysret, ud2 */
}

static bool operands(struct reader *reader, uint8_t opcode)
{
	const unsigned immediate = reader->short_operand ? 2 : 4;

	switch (one_byte[opcode]) {
	case '.': return true;
	case 'm': return modrm(reader, 0);
	case 'M': return modrm(reader, 1);
	case 'D': return modrm(reader, immediate);
	case 'b': reader->at += 1; return true;
	case 'w': reader->at += 2; return true;
	case 'e': reader->at += 3; return true;
	case 'd': reader->at += opcode == 0xe8 || opcode == 0xe9 ? 4 : immediate; return true;
	case 'o': reader->at += reader->short_address ? 4 : 8; return true;
	case 'q': reader->at += reader->wide ? 8 : immediate; return true;
	case 'F': return reader->at < reader->end && modrm(reader, (*reader->at >> 3 & 7) < 2 ? 1 : 0);
	case 'G': return reader->at < reader->end && modrm(reader, (*reader->at >> 3 & 7) < 2 ? immediate : 0);
	case 'V': return vector(reader, opcode);
	case 'E': return after_0f(reader);
	}
	return false;
}

bool decode(const uint8_t *start, const uint8_t *end, struct instruction *found)
{
	struct reader reader = {.at = start, .end = end, .found = found, .start = start};

	*found = (struct instruction){0};
	for (; reader.at < end && reader.at - start < 14; reader.at++) {
		char kind = one_byte[*reader.at];
		if (kind == 'R') {
			reader.wide = *reader.at & 8;
			reader.at++;
			break;
		}
		if (kind != 'p')
			break;
		reader.short_operand |= *reader.at == 0x66;
		reader.short_address |= *reader.at == 0x67;
	}
	if (reader.at >= end)
		return false;
	found->opcode = (uint8_t)(reader.at - start);
	uint8_t opcode = *reader.at++;
	if (!operands(&reader, opcode) || reader.at > end || reader.at - start > 15)
		return false;
	found->length = (uint8_t)(reader.at - start);
	return true;
}

/* ---- where it goes on ---- */
static const uint8_t *displaced(const uint8_t *next, const uint8_t *displacement, bool wide)
{
	int32_t by;

	if (!wide)
		return next + (int8_t)*displacement;
	memcpy(&by, displacement, sizeof(by));
	return next + by;
}

enum flow flow_of(const uint8_t *at, const struct instruction *is, const uint8_t **to)
{
	const uint8_t *opcode = at + is->opcode, *next = at + is->length;

	*to = NULL;
	if (*opcode == 0xe8 || *opcode == 0xe9) {
		*to = displaced(next, opcode + 1, true);
		return *opcode == 0xe8 ? FLOW_CALL : FLOW_END;
	}
	if (*opcode == 0xeb || (*opcode >= 0x70 && *opcode <= 0x7f) || (*opcode >= 0xe0 && *opcode <= 0xe3)) {
		*to = displaced(next, opcode + 1, false);
		return *opcode == 0xeb ? FLOW_END : FLOW_BRANCH;
	}
	if (*opcode == 0x0f && opcode[1] >= 0x80 && opcode[1] <= 0x8f) {
		*to = displaced(next, opcode + 2, true);
		return FLOW_BRANCH;
	}
	if (*opcode == 0xc3 || *opcode == 0xc2 || *opcode == 0xf4 || *opcode == 0xcc ||
	    (*opcode == 0x0f && opcode[1] == 0x0b))
		return FLOW_END;
	if (*opcode == 0xff && (at[is->modrm] >> 3 & 7) >= 4 && (at[is->modrm] >> 3 & 7) <= 5)
		return FLOW_END; /* jmp *…: by a table, maybe */
	if (*opcode == 0xff && (at[is->modrm] >> 3 & 7) >= 2 && (at[is->modrm] >> 3 & 7) <= 3)
		return FLOW_CALL;
	return FLOW_ON;
}
#endif
