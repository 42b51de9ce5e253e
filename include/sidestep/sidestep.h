/*
 * sidestep.h - explicit sockets, for C programs.
 *
 *   socket(AF_INET_OFFLOAD, SOCK_STREAM, IPPROTO_OFFLOAD_ANY)   whatever offload protocol there is, else TCP
 *   socket(AF_INET_OFFLOAD, SOCK_STREAM, IPPROTO_SDP)           SDP with other hosts, or EPROTONOSUPPORT
 *   socket(AF_INET, SOCK_STREAM, IPPROTO_SDP)                   the same
 *   socket(AF_INET_DIRECT, SOCK_STREAM, 0)                      TCP of the kernel, never offered
 *
 * These families exist for programs that run under sidestep; without it the kernel answers EAFNOSUPPORT, and
 * sidestep_socket() below opens an ordinary socket then. The descriptor is a TCP socket in every respect: addresses may
 * be given with the family of the socket or with AF_INET (AF_INET6), and are always told with the latter.
 *
 * IPPROTO_TCP, which getaddrinfo() puts into ai_protocol, is the number of a protocol, too: TCP and nothing else. Give 0
 * or IPPROTO_SDP. getaddrinfo() knows none of these families: ask it for AF_INET or AF_INET6.
 */
#ifndef SIDESTEP_SIDESTEP_H
#define SIDESTEP_SIDESTEP_H

#include <errno.h>
#include <sys/socket.h>

/* Numbers that no kernel gives to a family: beyond AF_MAX, and yet they fit sa_family. */
#define AF_INET_OFFLOAD 0x5344
#define AF_INET6_OFFLOAD 0x5345
#define AF_INET_DIRECT 0x5346
#define AF_INET6_DIRECT 0x5347

#define PF_INET_OFFLOAD AF_INET_OFFLOAD
#define PF_INET6_OFFLOAD AF_INET6_OFFLOAD
#define PF_INET_DIRECT AF_INET_DIRECT
#define PF_INET6_DIRECT AF_INET6_DIRECT

/* Numbers that no IP header can hold, and the wildcard. */
#define IPPROTO_SDP 0x534450
#define IPPROTO_OFFLOAD_ANY 0

/*
 * As socket(), but without sidestep an ordinary AF_INET or AF_INET6 socket where any protocol would have done. Addresses
 * have to be given with AF_INET or AF_INET6 then, so use these with it always.
 */
static inline int sidestep_socket(int family, int type, int protocol)
{
	int fd = socket(family, type, protocol);

	if (fd >= 0 || errno != EAFNOSUPPORT || protocol != IPPROTO_OFFLOAD_ANY)
		return fd;
	if (family == AF_INET_OFFLOAD || family == AF_INET_DIRECT)
		return socket(AF_INET, type, 0);
	if (family == AF_INET6_OFFLOAD || family == AF_INET6_DIRECT)
		return socket(AF_INET6, type, 0);
	return fd;
}

#endif
