#include "bench.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

static const char *const mode_names[] = {"blocking", "poll", "epoll"};

void bench_fail(const char *what)
{
	perror(what);
	exit(1);
}

void bench_refuse(const char *format, ...)
{
	va_list args;

	va_start(args, format);
	vfprintf(stderr, format, args);
	va_end(args);
	fputc('\n', stderr);
	exit(1);
}

void *bench_alloc(size_t count, size_t size)
{
	void *memory = calloc(count ? count : 1, size);

	if (!memory)
		bench_fail("calloc");
	return memory;
}

static enum bench_mode mode_by_name(const char *name)
{
	for (size_t i = 0; i < sizeof(mode_names) / sizeof(mode_names[0]); i++)
		if (!strcmp(name, mode_names[i]))
			return (enum bench_mode)i;
	bench_refuse("unknown mode '%s': use blocking, poll or epoll", name);
}

static double number(const char *text, char option, double least, double most)
{
	char *end;
	double value = strtod(text, &end);

	if (end == text || *end || !(value >= least && value <= most))
		bench_refuse("-%c takes a number from %g to %g, not '%s'", option, least, most, text);
	return value;
}

static double seconds_until(double start_at)
{
	double left = start_at - (double)bench_now_ns() / 1e9;

	if (left < 0)
		bench_refuse("the time to start at is %g s in the past", -left);
	return left;
}

static uint32_t address_of(const char *text)
{
	struct in_addr address;

	if (inet_pton(AF_INET, text, &address) != 1)
		bench_refuse("-h takes an IPv4 address, not '%s'", text);
	return ntohl(address.s_addr);
}

struct bench_options bench_options(int argc, char **argv, struct bench_options options)
{
	int option;

	if (argc < 2 || (strcmp(argv[1], "server") && strcmp(argv[1], "client")))
		bench_refuse("usage: %s server|client [-m blocking|poll|epoll] [-e] [-V] [-H] [-h HOST] [-p PORT] [-s SIZE] "
		             "[-n CONNECTIONS] [-a ADDRESSES] [-w WARMUP_S] [-S START_AT] [-t SECONDS] [-r PAUSE_S] [-c COUNT]",
		             argv[0]);
	options.server = !strcmp(argv[1], "server");
	options.host = INADDR_LOOPBACK;
	while ((option = getopt(argc - 1, argv + 1, "m:eVHh:p:s:n:a:w:S:t:r:c:")) != -1) {
		switch (option) {
		case 'm': options.mode = mode_by_name(optarg); break;
		case 'e': options.edge = true; break;
		case 'V': options.verify = true; break;
		case 'H': options.hold = true; break;
		case 'h': options.host = address_of(optarg); break;
		case 'p': options.port = (uint16_t)number(optarg, 'p', 0, 65535); break;
		case 's': options.size = (uint32_t)number(optarg, 's', 8, BENCH_SIZE_MAX); break;
		case 'n': options.connections = (uint32_t)number(optarg, 'n', 0, BENCH_CONNECTIONS_MAX); break;
		case 'a': options.addresses = (uint32_t)number(optarg, 'a', 1, 250); break;
		case 'w': options.warmup_s = number(optarg, 'w', 0, 3600); break;
		case 'S': options.warmup_s = seconds_until(number(optarg, 'S', 0, 1e12)); break;
		case 't': options.measure_s = number(optarg, 't', 0.001, 3600); break;
		case 'r': options.pause_s = number(optarg, 'r', 0, 3600); break;
		case 'c': options.count = (uint64_t)number(optarg, 'c', 1, 1e15); break;
		default: exit(2);
		}
	}
	if (!options.server && !options.port)
		bench_refuse("a client needs the server's port: -p PORT");
	return options;
}

uint64_t bench_now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

uint64_t bench_seconds_ns(double seconds)
{
	return (uint64_t)(seconds * 1e9);
}

static void set_nodelay(int fd)
{
	int on = 1;

	if (setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on)))
		bench_fail("TCP_NODELAY");
}

int bench_listen(const struct bench_options *options)
{
	struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(options->port)};
	socklen_t length = sizeof(address);
	int on = 1;
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

	if (fd < 0)
		bench_fail("socket");
	if (setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)))
		bench_fail("SO_REUSEADDR");
	address.sin_addr.s_addr = htonl(options->addresses > 1 ? INADDR_ANY : options->host);
	if (bind(fd, (struct sockaddr *)&address, sizeof(address)) || listen(fd, 4096))
		bench_fail("bind, listen");
	if (getsockname(fd, (struct sockaddr *)&address, &length))
		bench_fail("getsockname");
	printf("listening %u\n", ntohs(address.sin_port));
	fflush(stdout);
	return fd;
}

int bench_accept(int listener)
{
	int fd;

	do {
		fd = accept(listener, NULL, NULL);
	} while (fd < 0 && (errno == EINTR || errno == ECONNABORTED));
	if (fd >= 0)
		set_nodelay(fd);
	return fd;
}

int bench_connect(uint32_t host, uint16_t port)
{
	struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(host)};
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

	if (fd < 0)
		bench_fail("socket");
	set_nodelay(fd);
	if (connect(fd, (struct sockaddr *)&address, sizeof(address)))
		bench_fail("connect");
	return fd;
}

void bench_nonblocking(int fd)
{
	int status = fcntl(fd, F_GETFL);

	if (status < 0 || fcntl(fd, F_SETFL, status | O_NONBLOCK))
		bench_fail("O_NONBLOCK");
}

void bench_raise_file_limit(void)
{
	struct rlimit limit;

	if (getrlimit(RLIMIT_NOFILE, &limit))
		bench_fail("getrlimit");
	limit.rlim_cur = limit.rlim_max;
	if (setrlimit(RLIMIT_NOFILE, &limit))
		bench_fail("setrlimit");
}

void bench_write_all(int fd, const void *data, size_t size)
{
	const char *at = data;

	while (size) {
		ssize_t done = send(fd, at, size, MSG_NOSIGNAL);

		if (done < 0 && errno == EINTR)
			continue;
		if (done < 0)
			bench_fail("send");
		at += done;
		size -= (size_t)done;
	}
}

bool bench_read_all(int fd, void *data, size_t size)
{
	char *at = data;

	while (size) {
		ssize_t done = recv(fd, at, size, 0);

		if (done < 0 && errno == EINTR)
			continue;
		if (done == 0 || (done < 0 && bench_gone(errno)))
			return false;
		if (done < 0)
			bench_fail("recv");
		at += done;
		size -= (size_t)done;
	}
	return true;
}

bool bench_gone(int error)
{
	return error == ECONNRESET || error == EPIPE;
}

void bench_hold(const struct bench_options *options)
{
	char buffer[64];

	if (!options->hold)
		return;
	puts("holding");
	fflush(stdout);
	while (read(STDIN_FILENO, buffer, sizeof(buffer)) > 0)
		continue;
}

/* Values below 128 have a bucket each; above, 128 buckets an octave. */
static size_t bucket_of(uint64_t value)
{
	if (value < (1u << BENCH_HIST_SUB_BITS))
		return (size_t)value;
	unsigned octave = 63u - (unsigned)__builtin_clzll(value) - BENCH_HIST_SUB_BITS;

	return ((size_t)(octave + 1) << BENCH_HIST_SUB_BITS) + (size_t)((value >> octave) - (1u << BENCH_HIST_SUB_BITS));
}

static uint64_t bucket_middle(size_t bucket)
{
	uint64_t octave = bucket >> BENCH_HIST_SUB_BITS;
	uint64_t step = bucket & ((1u << BENCH_HIST_SUB_BITS) - 1);

	if (!octave)
		return step;
	octave--;
	return ((step + (1u << BENCH_HIST_SUB_BITS)) << octave) + ((UINT64_C(1) << octave) >> 1);
}

void bench_hist_add(struct bench_hist *hist, uint64_t value_ns)
{
	hist->bucket[bucket_of(value_ns)]++;
	if (!hist->count || value_ns < hist->min_ns)
		hist->min_ns = value_ns;
	if (value_ns > hist->max_ns)
		hist->max_ns = value_ns;
	hist->sum_ns += value_ns;
	hist->count++;
}

void bench_hist_merge(struct bench_hist *into, const struct bench_hist *from)
{
	if (!from->count)
		return;
	if (!into->count || from->min_ns < into->min_ns)
		into->min_ns = from->min_ns;
	if (from->max_ns > into->max_ns)
		into->max_ns = from->max_ns;
	into->count += from->count;
	into->sum_ns += from->sum_ns;
	for (size_t i = 0; i < BENCH_HIST_BUCKETS; i++)
		into->bucket[i] += from->bucket[i];
}

uint64_t bench_hist_quantile(const struct bench_hist *hist, double quantile)
{
	uint64_t rank = (uint64_t)(quantile * (double)hist->count);
	uint64_t seen = 0;

	for (size_t i = 0; i < BENCH_HIST_BUCKETS; i++) {
		seen += hist->bucket[i];
		if (seen > rank)
			return bucket_middle(i) < hist->max_ns ? bucket_middle(i) : hist->max_ns;
	}
	return hist->max_ns;
}

void bench_report(const char *program, const struct bench_options *options, uint64_t messages, uint64_t elapsed_ns,
                  const struct bench_hist *hist)
{
	double seconds = (double)elapsed_ns / 1e9;

	if (!messages || !elapsed_ns)
		bench_refuse("%s: nothing was measured; give it more time (-t)", program);
	printf("{\"program\": \"%s\", \"mode\": \"%s\", \"size\": %u, \"connections\": %u, \"messages\": %llu, "
	       "\"seconds\": %.6f, \"rate\": %.3f",
	       program, mode_names[options->mode], options->size, options->connections, (unsigned long long)messages,
	       seconds, (double)messages / seconds);
	if (hist)
		printf(", \"mean_ns\": %.1f, \"min_ns\": %llu, \"p50_ns\": %llu, \"p99_ns\": %llu, \"p999_ns\": %llu, "
		       "\"max_ns\": %llu",
		       (double)hist->sum_ns / (double)hist->count, (unsigned long long)hist->min_ns,
		       (unsigned long long)bench_hist_quantile(hist, 0.5), (unsigned long long)bench_hist_quantile(hist, 0.99),
		       (unsigned long long)bench_hist_quantile(hist, 0.999), (unsigned long long)hist->max_ns);
	puts("}");
	fflush(stdout);
}
