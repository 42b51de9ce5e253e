/* Echo with libevent's bufferevents. */
#include <arpa/inet.h>
#include <event2/buffer.h>
#include <event2/bufferevent.h>
#include <event2/event.h>
#include <event2/listener.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static struct event_base *base;
static int left;
static const char *place;

enum { NUDGE = 1000 };

struct client {
	int number;
	bool sends;
	size_t owed; /* of what was sent while the test wants to see it exchange a little */
	struct evbuffer *got;
};

static void fail(const char *what)
{
	perror(what);
	exit(1);
}

/* ---- server ---- */

static void server_drained(struct bufferevent *conn, void *ended)
{
	if (ended) {
		shutdown(bufferevent_getfd(conn), SHUT_WR);
		bufferevent_free(conn);
		return;
	}
	bufferevent_enable(conn, EV_READ);
}

static void server_read(struct bufferevent *conn, void *unused)
{
	struct evbuffer *out = bufferevent_get_output(conn);

	(void)unused;
	bufferevent_write_buffer(conn, bufferevent_get_input(conn));
	if (evbuffer_get_length(out) > 256 * 1024)
		bufferevent_disable(conn, EV_READ); /* until all of it has gone */
}

static void server_event(struct bufferevent *conn, short what, void *unused)
{
	(void)unused;
	if (what & BEV_EVENT_ERROR)
		fail("server");
	if (evbuffer_get_length(bufferevent_get_output(conn)) == 0)
		server_drained(conn, conn);
	else
		bufferevent_setcb(conn, NULL, server_drained, server_event, conn);
}

static void accepted(struct evconnlistener *listener, evutil_socket_t fd, struct sockaddr *from, int from_len,
                     void *unused)
{
	(void)listener, (void)from, (void)from_len, (void)unused;
	struct bufferevent *conn = bufferevent_socket_new(base, fd, BEV_OPT_CLOSE_ON_FREE);

	bufferevent_setcb(conn, server_read, server_drained, server_event, NULL);
	bufferevent_enable(conn, EV_READ | EV_WRITE);
}

/* ---- client ---- */

static void client_drained(struct bufferevent *conn, void *client)
{
	if (((struct client *)client)->sends && evbuffer_get_length(bufferevent_get_output(conn)) == 0)
		shutdown(bufferevent_getfd(conn), SHUT_WR);
}

static void client_go(struct bufferevent *conn, struct client *client)
{
	char name[4096], *data = calloc(1, 1 << 20);
	size_t count;

	snprintf(name, sizeof(name), "%s/wait", place);
	if (access(name, F_OK) == 0) {
		client->owed = NUDGE;
		bufferevent_write(conn, data, NUDGE);
	} else {
		snprintf(name, sizeof(name), "%s/%d.in", place, client->number);
		FILE *in = fopen(name, "rb");
		if (!in)
			fail(name);
		client->sends = true;
		while ((count = fread(data, 1, 1 << 20, in)) > 0)
			bufferevent_write(conn, data, count);
		fclose(in);
	}
	free(data);
}

static void client_read(struct bufferevent *conn, void *arg)
{
	struct client *client = arg;
	struct evbuffer *in = bufferevent_get_input(conn);

	if (client->owed) {
		size_t len = evbuffer_get_length(in);
		evbuffer_drain(in, len);
		client->owed -= len;
		if (client->owed == 0)
			client_go(conn, client);
		return;
	}
	evbuffer_add_buffer(client->got, in);
}

static void client_event(struct bufferevent *conn, short what, void *arg)
{
	struct client *client = arg;
	char name[4096];

	if (what & BEV_EVENT_CONNECTED) {
		client_go(conn, client);
		return;
	}
	if (!(what & BEV_EVENT_EOF))
		fail("client");
	client_read(conn, client);
	snprintf(name, sizeof(name), "%s/%d.out", place, client->number);
	FILE *out = fopen(name, "wb");
	size_t len = evbuffer_get_length(client->got);
	if (!out || fwrite(evbuffer_pullup(client->got, -1), 1, len, out) != len || fclose(out))
		fail(name);
	bufferevent_free(conn);
	if (--left == 0)
		event_base_loopbreak(base);
}

static void talk(const struct sockaddr_in *there, int number)
{
	struct client *client = malloc(sizeof(*client));
	struct bufferevent *conn = bufferevent_socket_new(base, -1, BEV_OPT_CLOSE_ON_FREE);

	*client = (struct client){.number = number, .got = evbuffer_new()};
	bufferevent_setcb(conn, client_read, client_drained, client_event, client);
	bufferevent_enable(conn, EV_READ | EV_WRITE);
	if (bufferevent_socket_connect(conn, (const struct sockaddr *)there, sizeof(*there)))
		fail("connect");
}

int main(int argc, char **argv)
{
	struct sockaddr_in addr = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t addr_len = sizeof(addr);

	base = event_base_new();
	if (argc == 2) {
		struct evconnlistener *listener = evconnlistener_new_bind(base, accepted, NULL, LEV_OPT_CLOSE_ON_FREE, 128,
		                                                          (struct sockaddr *)&addr, sizeof(addr));
		if (!listener || getsockname(evconnlistener_get_fd(listener), (struct sockaddr *)&addr, &addr_len))
			fail("listen");
		printf("%d\n", ntohs(addr.sin_port));
		fflush(stdout);
	} else {
		addr.sin_port = htons((uint16_t)atoi(argv[2]));
		left = atoi(argv[3]);
		place = argv[4];
		for (int number = 0, count = left; number < count; number++)
			talk(&addr, number);
	}
	event_base_dispatch(base);
	return 0;
}
