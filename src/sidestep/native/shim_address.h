/* shim_address.h - addresses as the records hold them: IPv4 is v4-mapped. */
#ifndef SIDESTEP_SHIM_ADDRESS_H
#define SIDESTEP_SHIM_ADDRESS_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/socket.h>

/* False: it is no complete address of these families. */
bool address_split(const struct sockaddr *address, socklen_t len, uint8_t addr[16], uint16_t *port);
/* In the form that a socket of that family has; false: it has none for it. */
bool address_join(int family, const uint8_t addr[16], uint16_t port, struct sockaddr_storage *to, socklen_t *len);
bool address_mapped(const uint8_t addr[16]);
bool address_translated(const uint8_t addr[16]); /* an end of a connection with the provider */
bool address_unspecified(const uint8_t addr[16]);
bool address_near(const uint8_t addr[16]); /* of this host, or none at all */

#endif
