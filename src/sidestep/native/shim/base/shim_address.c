/* shim_address.c - addresses as the records hold them, IPv4 v4-mapped, and as sockets do. */
#include "shim_address.h"

#include <netinet/in.h>
#include <string.h>

#include "layout.h"

bool address_split(const struct sockaddr *address, socklen_t len, uint8_t addr[16], uint16_t *port)
{
	if (address->sa_family == AF_INET && len >= sizeof(struct sockaddr_in)) {
		const struct sockaddr_in *in = (const struct sockaddr_in *)address;
		memset(addr, 0, 10);
		memset(addr + 10, 0xff, 2);
		memcpy(addr + 12, &in->sin_addr, 4);
		*port = ntohs(in->sin_port);
		return true;
	}
	if (address->sa_family == AF_INET6 && len >= 24) { /* SIN6_LEN_RFC2133: without the scope */
		const struct sockaddr_in6 *in6 = (const struct sockaddr_in6 *)address;
		memcpy(addr, &in6->sin6_addr, 16);
		*port = ntohs(in6->sin6_port);
		return true;
	}
	return false;
}

bool address_mapped(const uint8_t addr[16])
{
	static const uint8_t mapped[12] = {[10] = 0xff, [11] = 0xff};

	return memcmp(addr, mapped, sizeof(mapped)) == 0;
}

bool address_translated(const uint8_t addr[16])
{
	uint32_t v4;

	memcpy(&v4, addr + 12, sizeof(v4));
	return address_mapped(addr) && (ntohl(v4) & TRANSLATED_MASK) == (TRANSLATED_ADDRESS & TRANSLATED_MASK);
}

bool address_unspecified(const uint8_t addr[16])
{
	static const uint8_t none[16];

	return memcmp(address_mapped(addr) ? addr + 12 : addr, none, address_mapped(addr) ? 4 : 16) == 0;
}

bool address_near(const uint8_t addr[16])
{
	static const uint8_t loopback[16] = {[15] = 1};

	return address_unspecified(addr) || (address_mapped(addr) ? addr[12] == 127 : memcmp(addr, loopback, 16) == 0);
}

bool address_join(int family, const uint8_t addr[16], uint16_t port, struct sockaddr_storage *to, socklen_t *len)
{
	struct sockaddr_in in = {.sin_family = AF_INET, .sin_port = htons(port)};
	struct sockaddr_in6 in6 = {.sin6_family = AF_INET6, .sin6_port = htons(port)};

	if (family == AF_INET && !address_mapped(addr))
		return false;
	memcpy(&in.sin_addr, addr + 12, 4);
	memcpy(&in6.sin6_addr, addr, 16);
	memset(to, 0, sizeof(*to));
	if (family == AF_INET)
		memcpy(to, &in, *len = sizeof(in));
	else
		memcpy(to, &in6, *len = sizeof(in6));
	return true;
}
