/*
 * fuzz_main.c - runs a libFuzzer target without libFuzzer, for compilers that have none: inputs from a seed, mutated
 * from one another without guidance. usage: PROGRAM SEED RUNS
 */
#include "check.h"

#define INPUT_MAX 400u
#define KEPT 64u

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int main(int argc, char **argv)
{
	static struct {
		uint8_t bytes[INPUT_MAX];
		size_t len;
	} kept[KEPT];

	if (argc != 3) {
		fprintf(stderr, "usage: %s SEED RUNS\n", argv[0]);
		return 2;
	}
	struct dice dice = {strtoull(argv[1], NULL, 10)};
	uint64_t runs = strtoull(argv[2], NULL, 10);
	for (uint64_t run = 0; run < runs; run++) {
		size_t at = dice_below(&dice, KEPT);
		if (dice_below(&dice, 4) == 0) {
			kept[at].len = dice_below(&dice, INPUT_MAX + 1);
			for (size_t i = 0; i < kept[at].len; i++)
				kept[at].bytes[i] = (uint8_t)dice_roll(&dice);
		}
		for (uint64_t changes = 1 + dice_below(&dice, 8); changes && kept[at].len; changes--)
			kept[at].bytes[dice_below(&dice, kept[at].len)] =
				dice_below(&dice, 3) ? (uint8_t)dice_roll(&dice) : (uint8_t)(0 - dice_below(&dice, 3));
		LLVMFuzzerTestOneInput(kept[at].bytes, kept[at].len);
	}
	printf("%llu\n", (unsigned long long)runs);
	return 0;
}
