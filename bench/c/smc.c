/* smc.c - LD_PRELOAD: stream sockets of the Internet families are made as AF_SMC ones, as smc_run of smc-tools does. */
#include <dlfcn.h>
#include <netinet/in.h>
#include <stdbool.h>
#include <sys/socket.h>

enum { SMCPROTO_SMC, SMCPROTO_SMC6 }; /* net/smc.h */

int socket(int family, int type, int protocol)
{
	int (*next)(int, int, int);
	bool internet = family == AF_INET || family == AF_INET6;
	int kind = type & ~(SOCK_NONBLOCK | SOCK_CLOEXEC);

	*(void **)&next = dlsym(RTLD_NEXT, "socket");
	if (internet && kind == SOCK_STREAM && (protocol == 0 || protocol == IPPROTO_TCP))
		return next(AF_SMC, type, family == AF_INET ? SMCPROTO_SMC : SMCPROTO_SMC6);
	return next(family, type, protocol);
}
