/* C stdio on sockets, and the names that _FORTIFY_SOURCE calls. Lengths come from `volatile`, so that they are checked at
 * run time, through __read_chk and its kin. The peer's pattern holds any byte, so lines of text go between two ends here. */
#include "scene.h"

/* `len` bytes, however many segments they come in; 0: whatever comes first. */
static void say_text_of(const char *name, int fd, size_t len)
{
	char text[4096];
	ssize_t got = recv(fd, text, len ? len : sizeof text - 1, len ? MSG_WAITALL : 0);
	if (got <= 0) {
		say_ret(name, got);
		return;
	}
	text[got] = '\0';
	for (char *at = text; (at = strchr(at, '\n'));)
		*at = '/';
	say("%s: %s", name, text);
}

static void say_text(const char *name, int fd)
{
	say_text_of(name, fd, 0);
}

static void stdio_both_ways(void)
{
	int fds[2];
	char line[256];
	both_ends(fds);
	FILE *in = fdopen(dup(fds[0]), "r"), *out = fdopen(fds[0], "w");
	NEED(in && out);
	say_ret("fprintf", fprintf(out, "hello %d\n", 42));
	say_ret("fputs", fputs("line two\n", out) >= 0);
	say_ret("fflush", fflush(out));
	say_text("the other end", fds[1]);
	NEED(send(fds[1], "first\nsecond\nthi", 16, 0) == 16);
	say("fgets %s", fgets(line, sizeof line, in));
	say("fgets %s", fgets(line, sizeof line, in));
	NEED(send(fds[1], "rd\nxyz", 6, 0) == 6);
	say("fgets %s", fgets(line, sizeof line, in));
	say("fgetc %c", fgetc(in));
	say("ungetc %c", ungetc('w', in));
	say_ret("fread", (long)fread(line, 1, 3, in));
	say("%.3s", line);
	for (int i = 0; i < 100; i++) {
		fprintf(out, "message %d\n", i);
		fflush(out);
		snprintf(line, sizeof line, "answer %d\n", i);
		NEED(send(fds[1], line, strlen(line), 0) == (ssize_t)strlen(line));
		char *text = NULL;
		size_t room = 0;
		NEED(getline(&text, &room, in) > 0 && !strcmp(text, line));
		free(text);
		NEED(recv(fds[1], line, sizeof line, 0) > 0);
	}
	say("fileno %d", fileno(out) == fds[0]);
	say_ret("fputs", fputs("last words", out) >= 0);
	say_ret("fclose", fclose(out));
	say_text("the other end", fds[1]);
	NEED(shutdown(fds[1], SHUT_WR) == 0);
	say_ret("fgetc at the end", fgetc(in));
	say("feof %d ferror %d", !!feof(in), !!ferror(in));
	say_ret("fclose", fclose(in));
	say_text("the other end", fds[1]);
}

static void stdio_one_stream(void)
{
	int fds[2];
	char line[256];
	both_ends(fds);
	FILE *stream = fdopen(fds[0], "r+");
	NEED(stream);
	NEED(setvbuf(stream, NULL, _IONBF, 0) == 0);
	for (int i = 0; i < 20; i++) {
		NEED(fprintf(stream, "question %d\n", i) > 0);
		NEED(recv(fds[1], line, sizeof line, 0) > 0);
		NEED(send(fds[1], line, strcspn(line, "\n") + 1, 0) > 0);
		NEED(fgets(line, sizeof line, stream));
		if (i % 7 == 0)
			say("%s", line);
	}
	say_ret("fwrite", (long)fwrite("abcdef", 2, 3, stream));
	say_text("the other end", fds[1]);
	say_ret("close", close(fds[1]));
	signal(SIGPIPE, SIG_IGN);
	struct pollfd item = {.fd = fds[0], .events = POLLRDHUP};
	NEED(poll(&item, 1, 5000) == 1); /* the end comes first: a provider between hands it on */
	item.events = 0;
	fputs("into nothing", stream);
	poll(&item, 1, 5000);
	say_ret("fputs", fputs("into nothing", stream));
	say("ferror %d %s", !!ferror(stream), strerrorname_np(errno));
	say_ret("fclose", fclose(stream));
}

static void stdio_standard(void)
{
	/* A program started by inetd: the connection is stdin and stdout. */
	int fds[2], kept[2];
	char word[64];
	int number;
	both_ends(fds);
	NEED((kept[0] = dup(0)) >= 0 && (kept[1] = dup(1)) >= 0);
	NEED(dup2(fds[0], 0) == 0 && dup2(fds[0], 1) == 1);
	NEED(close(fds[0]) == 0);
	NEED(send(fds[1], "17 words follow\nand a line\n", 27, 0) == 27);
	say_ret("scanf", scanf("%d %63s", &number, word));
	say("%d %s", number, word);
	say("getchar %d", getchar());
	say("fgets %s", fgets(word, sizeof word, stdin));
	printf("printf %d\n", number);
	puts("puts");
	putchar('!');
	say_ret("fflush", fflush(stdout));
	say_text_of("the other end", fds[1], 16); /* musl writes the first line at once, and the rest here */
	perror("");
	say_ret("read after stdio", read(0, word, 0));
	NEED(send(fds[1], "more\n", 5, 0) == 5);
	say("fgets %s", fgets(word, sizeof word, stdin));
	NEED(shutdown(fds[1], SHUT_WR) == 0);
	say("fgets at the end %d", fgets(word, sizeof word, stdin) ? 1 : (word[0] != 'm') * 0);
	NEED(fgets(word, sizeof word, stdin) || feof(stdin));
	NEED(dup2(kept[0], 0) == 0 && dup2(kept[1], 1) == 1);
	say_text("the other end", fds[1]);
}

static void stdio_dprintf(void)
{
	int fds[2];
	both_ends(fds);
	for (int i = 0; i < 3; i++) {
		say_ret("dprintf", dprintf(fds[0], "number %d, word %s\n", i, "w"));
		say_text("the other end", fds[1]);
	}
	char long_text[3000];
	memset(long_text, 'y', sizeof long_text - 1);
	long_text[sizeof long_text - 1] = '\0';
	say_ret("dprintf of much", dprintf(fds[0], "%s", long_text));
	NEED(recv(fds[1], long_text, 2999, MSG_WAITALL) == 2999);
	FILE *in = fdopen(fds[1], "r");
	say_ret("send", send(fds[0], "one\ntwo\n", 8, 0));
	say("fgets %s", fgets(long_text, 100, in));
	say_ret("freopen", freopen("/dev/zero", "r", in) == in);
	say("fgetc %d", fgetc(in));
	struct pollfd item = {.fd = fds[0], .events = POLLRDHUP};
	say_ret("the end, by freopen", poll(&item, 1, 5000));
}

static void fortified(void)
{
	/* Sizes the compiler knows, lengths it does not. */
	struct pair *pair = open_pair();
	uint8_t bytes[256];
	volatile size_t len = 20;
	struct pollfd items[4];
	volatile nfds_t one = 1;
	for (int i = 0; i < 50; i++) {
		peer_put(pair, 100);
		arrived(pair, 100);
		items[0] = (struct pollfd){.fd = pair->fd, .events = POLLIN};
		NEED(poll(items, one, 1000) == 1);
		struct timespec none = {0};
		NEED(ppoll(items, one, &none, NULL) == 1);
		fd_set in;
		FD_ZERO(&in);
		volatile int fd = pair->fd;
		FD_SET(fd, &in);
		NEED(select(fd + 1, &in, NULL, NULL, NULL) == 1);
		NEED(recv(fd, bytes, len, 0) == 20 && took(pair, bytes, 20));
		NEED(read(fd, bytes, len) == 20 && took(pair, bytes, 20));
		NEED(recvfrom(fd, bytes, len, 0, NULL, NULL) == 20 && took(pair, bytes, 20));
		NEED(recv(fd, bytes, len, MSG_PEEK) == 20);
		NEED(read(fd, bytes, len * 2) == 40 && took(pair, bytes, 40));
		put(pair, 10);
		peer_get(pair, 10);
	}
	int fds[2];
	char line[64];
	volatile int room = sizeof line;
	both_ends(fds);
	FILE *stream = fdopen(fds[0], "r+");
	NEED(dprintf(fds[1], "%s\n", "text") == 5);
	NEED(fgets(line, room, stream) && !strcmp(line, "text\n"));
	NEED(dprintf(fds[1], "%s", "block") == 5);
	NEED(fread(line, 1, len / 4, stream) == 5 && !memcmp(line, "block", 5));
	NEED(fprintf(stream, "%s", "back") == 4 && fflush(stream) == 0);
	say_text("the other end", fds[1]);
	stays(pair);
}

const struct scene scenes_stdio[] = {
	SCENE(stdio_both_ways), SCENE(stdio_one_stream), SCENE(stdio_standard),
	SCENE(stdio_dprintf),   SCENE(fortified),        {NULL, NULL},
};
