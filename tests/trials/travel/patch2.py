s = open('t.c').read()
s = s.replace('} else if (!strcmp(argv[1], "rlim0")) {', '''} else if (!strcmp(argv[1], "raceexec") || !strcmp(argv[1], "racespawn")) {
		pthread_t t;
		args[0] = (char *)program;
		extern char **environ;
		pthread_create(&t, NULL, fails, NULL);
		usleep(20000);
		for (int i = 0; i < 100 && argv[1][4] == 's'; i++) {
			char *a[] = {"/bin/sh", "-c", "ls -l /proc/self/fd | grep -q 'memfd:sidestep' && echo LEAKED", NULL};
			pid_t p; int st;
			NEED(posix_spawn(&p, a[0], NULL, NULL, a, environ) == 0);
			waitpid(p, &st, 0);
		}
		execl(program, program, "reader", number, (char *)NULL);''')
s = s.replace('static char *args[4];', '''#include <pthread.h>
static char *args[4];
static char large[1 << 20];
static void *fails(void *x) { memset(large, 'x', sizeof large - 1); for (;;) execl("/proc/self/exe", "t", large, NULL); }
''')
open('t.c','w').write(s)
