/*
 * shim_tcp_wait.c - waits on TCP.
 *
 * Between two ends on one host the kernel's wake-up costs more than the wait itself: an idle CPU has to be interrupted. So a
 * blocking call of a native connection, or of a listener, asks a few times before it sleeps. How long depends on what paid
 * lately for this thread. Only tracked connections, whose peers are near, come here.
 *
 * No peer rings a thread that sleeps in the kernel's own call. In a process that has rings it sleeps here first, where it hears
 * the provider, and answers what peers ask of its connections (shim_serve.c). A call that sleeps in its midst does not: one
 * with MSG_WAITALL behind its first byte, a write that fills TCP's buffer.
 */
#include "shim_tcp_wait.h"
#include "shim_call.h"
#include "shim_spin.h"

#include <sys/ioctl.h>

#define TCP_SPIN_NS 30000

struct tcp_spin {
	uint32_t budget;
	bool known;
};
static __thread struct tcp_spin spin_receiving, spin_accepting;

static bool tcp_spin_begin(struct tcp_spin *tcp, struct spin *spin)
{
	uint32_t most = config.spin_ns < TCP_SPIN_NS ? config.spin_ns : TCP_SPIN_NS;

	if (!tcp->known)
		*tcp = (struct tcp_spin){most, true};
	/* The CPU is given away between two questions: the other side needs the socket's lock, or this very CPU. */
	return spin_begin(spin, tcp->budget, cpu_now()) && !spin->crowded;
}

static void tcp_spin_learn(struct tcp_spin *tcp, int64_t waited_ns)
{
	uint32_t most = config.spin_ns < TCP_SPIN_NS ? config.spin_ns : TCP_SPIN_NS;

	/* a wait counts as short even if the wake-up from its sleep made it long */
	if (waited_ns < 4 * (int64_t)most)
		tcp->budget = most;
	else if (tcp->budget > most / 16)
		tcp->budget /= 2;
}

static bool tcp_spin_on(struct spin *spin)
{
	uint32_t calls = self.calls;

	spin->shares = true;
	bool on = spin_on(spin, cpu_now(), false);
	self.calls = calls; /* count of calls, without those of a connection that goes by ring */
	return on;
}

/* ---- hearing the provider meanwhile ---- */
int tcp_wait_poll(struct pollfd *fds, nfds_t len, int64_t deadline, uint64_t signals, const sigset_t *mask)
{
	for (;;) {
		rpc_listen_passing();
		int64_t now = now_ns();
		conns_trim(now);
		self.full_until = 0;
		int64_t until = sleep_deadline(deadline, now);
		fds[len] = (struct pollfd){.fd = self_doorbell_fd(NULL, 0), .events = POLLIN};
		int ready = sleep_poll(fds, len + 1, until, signals, mask);
		if (ready < 0)
			return ready;
		if (fds[len].revents) {
			self_doorbells_clear();
			rpc_listen_passing();
			ready--;
		}
		if (ready)
			return ready;
		if (self.signals != signals)
			return fail_with(EINTR);
		if (deadline != INT64_MAX && now_ns() >= deadline)
			return 0;
	}
}

/*
 * A read goes over an urgent byte before it waits, and a close after it is no reset. The kernel cannot write to this buffer, so it
 * takes no byte that has come since.
 */
void tcp_pass_mark(int fd)
{
	int marked = 0;
	KEEP_ERRNO;

	if (real.ioctl(fd, SIOCATMARK, &marked) == 0 && marked)
		raw_recv(fd, NULL, 1, MSG_DONTWAIT);
}

bool tcp_wait_fails(int fd, int flags)
{
	const uint64_t interrupting = self.signals_interrupting;
	struct pollfd fds[2] = {{.fd = fd, .events = POLLIN}};
	struct timeval limit = {0};
	const int saved = errno;
	int low = 1;

	/* a call that ends below the low-water mark returns what is there, of which poll(2) does not tell */
	if ((flags & (MSG_DONTWAIT | MSG_OOB | MSG_ERRQUEUE)) || raw_poll(fds, 1, 0) != 0 || would_not_block(fd, flags) ||
	    (option_get(fd, SOL_SOCKET, SO_RCVLOWAT, &low, sizeof(low)) && low > 1)) {
		errno = saved;
		return false;
	}
	option_get(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
	bool timed = limit.tv_sec || limit.tv_usec;
	int64_t timeout = timed ? timespec_ns(&(struct timespec){limit.tv_sec, limit.tv_usec * 1000}) : -1;
	int64_t deadline = deadline_after(timeout);
	for (;;) {
		int ready = tcp_wait_poll(fds, 1, deadline, self.signals, NULL);
		if (ready > 0 || (ready < 0 && errno != EINTR)) {
			errno = saved;
			return false;
		}
		/* signal(7): with a timeout set, SA_RESTART does not restart */
		if (ready == 0 || timed || self.signals_interrupting != interrupting) {
			if (!(flags & MSG_PEEK))
				tcp_pass_mark(fd);
			errno = ready ? EINTR : EAGAIN;
			return true;
		}
	}
}

/* recv() with no flags, of a native connection. */
ssize_t tcp_wait_receive(struct conn *conn, int fd, void *buf, size_t n)
{
	uint64_t signals = self.signals_interrupting;
	struct spin spin;

	if (n == 0 || word_load(conn->nonblock) || conn->slot->rx_low_water != 1 || !tcp_spin_begin(&spin_receiving, &spin))
		return TCP_WAIT(fd, n ? 0 : MSG_DONTWAIT, real.recv(fd, buf, n, 0));
	pthread_testcancel();
	int saved = errno;
	int64_t start = 0, now;
	for (;;) {
		ssize_t got = raw_recv(fd, buf, n, MSG_DONTWAIT);
		bool waits = got < 0 && errno == EAGAIN;
		if (waits || start)
			now = now_ns();
		if (!waits) {
			if (start)
				tcp_spin_learn(&spin_receiving, now - start);
			if (got >= 0)
				errno = saved;
			return got;
		}
		if (!start)
			start = now;
		if (self.signals_interrupting != signals)
			return fail_with(EINTR);
		if (!tcp_spin_on(&spin))
			break;
	}
	errno = saved;
	ssize_t got = TCP_WAIT(fd, 0, real.recv(fd, buf, n, 0));
	saved = errno;
	tcp_spin_learn(&spin_receiving, now_ns() - start);
	errno = saved;
	return got;
}

/* The kernel refuses it at once on a socket that does not listen. */
static int accept_now(int fd, struct sockaddr *address, socklen_t *len, int flags)
{
	int listens = 0;

	if (unlikely(word_load(rings_ever)) && option_get(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, sizeof(listens)) &&
	    listens && tcp_wait_fails(fd, 0))
		return -1;
	return real.accept4(fd, address, len, flags);
}

int tcp_wait_accept(int fd, struct sockaddr *address, socklen_t *len, int flags)
{
	uint64_t signals = self.signals_interrupting;
	struct pollfd in = {.fd = fd, .events = POLLIN};
	struct spin spin;

	if (!tcp_spin_begin(&spin_accepting, &spin) || raw_poll(&in, 1, 0) != 0 ||
	    (real.fcntl64(fd, F_GETFL, 0) & O_NONBLOCK))
		return accept_now(fd, address, len, flags);
	int64_t start = now_ns();
	do {
		if (self.signals_interrupting != signals)
			return fail_with(EINTR);
	} while (tcp_spin_on(&spin) && raw_poll(&in, 1, 0) == 0);
	int got = accept_now(fd, address, len, flags), saved = errno;
	tcp_spin_learn(&spin_accepting, now_ns() - start);
	errno = saved;
	return got;
}
