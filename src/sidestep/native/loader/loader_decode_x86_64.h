/* loader_decode_x86_64.h - instructions of x86-64; see loader_decode_x86_64.c. */
#ifndef SIDESTEP_LOADER_DECODE_X86_64_H
#define SIDESTEP_LOADER_DECODE_X86_64_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct instruction {
	uint8_t length;
	uint8_t opcode; /* offset of its first byte behind the prefixes */
	uint8_t modrm;  /* offset; 0: none */
	bool relative;  /* relative to its own address, by the four bytes behind modrm */
};
bool decode(const uint8_t *at, const uint8_t *end, struct instruction *found); /* false: no instruction */
enum flow { FLOW_ON, FLOW_BRANCH, FLOW_CALL, FLOW_END };
/* The effect of an instruction on the flow, and its target; NULL: that is not known, or nowhere. */
enum flow flow_of(const uint8_t *at, const struct instruction *is, const uint8_t **to);

#endif
