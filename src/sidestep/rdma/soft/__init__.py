"""What every device made of software needs, whatever carries its messages: keys, memory, queues.

- `keys`: the 32-bit keys (iWARP: STags), hard to guess and scattered.
- `memory`: protection domains and regions; `Domain.grant` is the one place where access by the other end is decided.
- `queues`: completion queues, and the calls to users that wait to be made.
- `device`: a base that ties them together; a device adds its connection manager and its queue pairs.
- `ordered`: queue pairs whose requests wait, leave and complete in order, answered one by one.
- `manager`: a base of connection managers, with their listeners; `handshake`: those that speak as InfiniBand does.

Nothing here reads a clock, waits or calls a user: what is to be told is put into `notices`, and whoever drives the
device takes it out and calls it.
"""
