/*
 * Two processes that talk by UCX over TCP, and sleep in an epoll set: the worker's set is in it, and the sets of the transports
 * are in the worker's. Each message comes back as it was sent. Says how many bytes were whole, and ends with its input.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <ucp/api/ucp.h>
#include <unistd.h>

#define ROUNDS 300
#define LEN_MAX 300000
#define TAG 7
#define PATIENCE_MS 30000

static uint8_t sent[LEN_MAX], got[LEN_MAX];

static void fail(const char *what)
{
	fprintf(stderr, "%d: %s\n", getpid(), what);
	exit(1);
}

static void need(ucs_status_t status, const char *what)
{
	if (status != UCS_OK)
		fail(what);
}

static void finish(ucp_worker_h worker, int set, void *request, const char *what)
{
	struct epoll_event event;

	if (UCS_PTR_IS_ERR(request))
		fail(what);
	while (request && ucp_request_check_status(request) == UCS_INPROGRESS) {
		if (ucp_worker_progress(worker))
			continue;
		ucs_status_t armed = ucp_worker_arm(worker);
		if (armed == UCS_ERR_BUSY)
			continue;
		need(armed, "arm");
		if (epoll_wait(set, &event, 1, PATIENCE_MS) != 1)
			fail(what);
	}
	if (request) {
		need(ucp_request_check_status(request), what);
		ucp_request_free(request);
	}
}

static size_t length_of(int round)
{
	return round % 10 == 9 ? LEN_MAX - (size_t)round : 1 + (size_t)round * 37 % 9000;
}

static size_t talk(int other, int first)
{
	ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES, .features = UCP_FEATURE_TAG | UCP_FEATURE_WAKEUP};
	ucp_worker_params_t worker_params = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
	                                     .thread_mode = UCS_THREAD_MODE_SINGLE};
	ucp_request_param_t none = {0};
	ucp_context_h context;
	ucp_worker_h worker;
	ucp_address_t *mine;
	ucp_ep_h end;
	size_t len, whole = 0;
	int waker, set = epoll_create1(EPOLL_CLOEXEC);
	struct epoll_event event = {.events = EPOLLIN};

	need(ucp_init(&params, NULL, &context), "init");
	need(ucp_worker_create(context, &worker_params, &worker), "worker");
	need(ucp_worker_get_efd(worker, &waker), "waker");
	if (epoll_ctl(set, EPOLL_CTL_ADD, waker, &event) < 0)
		fail("epoll_ctl");
	need(ucp_worker_get_address(worker, &mine, &len), "address");
	uint8_t theirs[4096];
	if (len > sizeof(theirs) || send(other, mine, len, 0) != (ssize_t)len ||
	    recv(other, theirs, sizeof(theirs), 0) <= 0)
		fail("addresses");
	ucp_ep_params_t ep_params = {.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS, .address = (ucp_address_t *)theirs};
	need(ucp_ep_create(worker, &ep_params, &end), "end");
	for (int round = 0; round < ROUNDS; round++) {
		size_t n = length_of(round);
		for (size_t i = 0; i < n; i++)
			sent[i] = (uint8_t)(i * 31 + (size_t)round * 7 + i / 251);
		memset(got, 0, n);
		if (first)
			finish(worker, set, ucp_tag_send_nbx(end, sent, n, TAG, &none), "send");
		finish(worker, set, ucp_tag_recv_nbx(worker, got, n, TAG, ~(ucp_tag_t)0, &none), "receive");
		if (!first)
			finish(worker, set, ucp_tag_send_nbx(end, got, n, TAG, &none), "send back");
		if (memcmp(sent, got, n) != 0)
			fail("wrong bytes");
		whole += n;
	}
	finish(worker, set, ucp_worker_flush_nbx(worker, &none), "flush");
	return whole;
}

int main(void)
{
	int pair[2];
	char c;

	if (socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair) < 0)
		fail("socketpair");
	pid_t child = fork();
	close(pair[child != 0]);
	size_t whole = talk(pair[!child], child != 0);
	if (child) {
		printf("%zu bytes are whole\n", whole);
		fflush(stdout);
		if (read(0, &c, 1) != 0)
			fail("input");
		close(pair[0]);
	} else if (recv(pair[1], &c, 1, 0) > 0) {
		fail("the other talks on");
	}
	_exit(0);
}
