/* provider.h - the provider's part, played by its messages: pairs offers and claims, and sends commands. */
#ifndef SIDESTEP_SIM_PROVIDER_H
#define SIDESTEP_SIM_PROVIDER_H

#include <stdbool.h>
#include <stdint.h>

struct conn_slot;
bool provider_can(int end);  /* a message of that end waits */
void provider_move(int end); /* takes it */
void provider_order(int end, bool promote);
void provider_dies(void); /* the next one is there at once, and knows of nothing */
const struct conn_slot *provider_slot(int end); /* of the connection; NULL: none known */
struct channel_segment *provider_segment(int side,
                                         int *place); /* of its channel, and which side of that it is; or NULL */
extern bool provider_relays;          /* it stands between */

#endif
