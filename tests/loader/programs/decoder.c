/* Where the instructions of FILE begin, by the loader's decoder: in the SIZE bytes at OFFSET. One a line, in hexadecimal. */
#include "loader.h"

#include <stdio.h>
#include <stdlib.h>

int main(int argc, char **argv)
{
	if (argc != 4)
		return 2;
	FILE *file = fopen(argv[1], "rb");
	const long offset = atol(argv[2]), size = atol(argv[3]);
	uint8_t *code = malloc((size_t)size); /* so that a sanitizer sees what is read behind its end */
	struct instruction is;

	if (!file || !code || fseek(file, offset, SEEK_SET) || fread(code, 1, (size_t)size, file) != (size_t)size)
		return 2;
	for (long at = 0; at < size; at += is.length) {
		bool known = decode(code + at, code + size, &is);
		printf("%lx%s\n", at, known ? "" : " bad");
		if (!known)
			is.length = 1;
	}
	fclose(file);
	free(code);
	return 0;
}
