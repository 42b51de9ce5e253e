/* shim_address.h - addresses as the records hold them: IPv4 is v4-mapped. */
#ifndef SIDESTEP_SHIM_ADDRESS_H
#define SIDESTEP_SHIM_ADDRESS_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/socket.h>

/* False: the address is incomplete, or of another family. */
bool address_split(const struct sockaddr *address, socklen_t len, uint8_t addr[16], uint16_t *port);
/* The address in the form of that family's sockets; false: it has none for it. */
bool address_join(int family, const uint8_t addr[16], uint16_t port, struct sockaddr_storage *to, socklen_t *len);
bool address_mapped(const uint8_t addr[16]);
bool address_translated(const uint8_t addr[16]); /* an end of a connection with the provider */
bool address_unspecified(const uint8_t addr[16]);
bool address_near(const uint8_t addr[16]); /* true for an address of this host, or none at all */

#endif
