/* usage: starts HOW PROGRAM: empties the environment and executes PROGRAM, in each way that there is. */
#include <fcntl.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

int main(int argc, char **argv)
{
	const char *how = argv[1], *slash = argc > 2 ? strrchr(argv[2], '/') : NULL;
	char *program = argv[argc > 2 ? 2 : 0], *name = slash ? (char *)slash + 1 : program;
	char *words[] = {name, NULL}, *empty[] = {NULL}, *own[] = {"A=b", NULL}, line[4096];
	pid_t child;

	clearenv();
	if (!strcmp(how, "execve"))
		execve(program, words, empty);
	else if (!strcmp(how, "execve-null"))
		execve(program, words, NULL);
	else if (!strcmp(how, "execv"))
		execv(program, words);
	else if (!strcmp(how, "execvp"))
		execvp(name, words);
	else if (!strcmp(how, "execvpe"))
		execvpe(name, words, own);
	else if (!strcmp(how, "execl"))
		execl(program, name, NULL);
	else if (!strcmp(how, "execlp"))
		execlp(name, name, NULL);
	else if (!strcmp(how, "execle"))
		execle(program, name, NULL, own);
	else if (!strcmp(how, "fexecve"))
		fexecve(open(program, O_RDONLY | O_CLOEXEC), words, empty);
	else if (!strcmp(how, "execveat"))
		execveat(AT_FDCWD, program, words, empty, 0);
	else if (!strcmp(how, "execveat-empty"))
		execveat(open(program, O_RDONLY | O_CLOEXEC), "", words, empty, AT_EMPTY_PATH);
	else if (!strcmp(how, "posix_spawn"))
		return posix_spawn(&child, program, NULL, NULL, words, empty) || wait(NULL) < 0;
	else if (!strcmp(how, "posix_spawnp"))
		return posix_spawnp(&child, name, NULL, NULL, words, own) || wait(NULL) < 0;
	else if (!strcmp(how, "system"))
		return system(program);
	else if (!strcmp(how, "popen")) {
		FILE *from = popen(program, "r");
		while (from && fgets(line, sizeof(line), from))
			fputs(line, stdout);
		return from ? pclose(from) : 1;
	}
	return 1;
}
