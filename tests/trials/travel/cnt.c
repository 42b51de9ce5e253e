#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
extern char **environ;
int main(int argc, char **argv) { int n = 0; char b[4096]; while (environ[n]) n++; printf("%d entries, LAST %s\n", n, getenv("LAST") ?: "missing"); read(atoi(argv[2]), b, sizeof b); write(atoi(argv[2]), "ok", 2); }
