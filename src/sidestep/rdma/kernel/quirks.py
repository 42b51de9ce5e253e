"""What single drivers do otherwise than the rest: each was met, and is told by the name of the kernel's device.

| driver | what | what is done |
| --- | --- | --- |
| siw | libsiw (rdma-core 44) takes the offset 0x90000 of a queue's memory for "none" and makes no queue there | a queue is held whose memory covers it |
| siw | depths of RDMA Reads are told the other way round to who asked for a connection | read so |
| siw | completes RDMA Reads behind later requests | completions are told in order all the same |
| siw | refuses a fence on an RDMA Read (libsiw) | left out: Reads are done in order anyway (RFC 5040 5.5) |
| siw | wants local rights only of the sink of an RDMA Read, unlike adapters | `read_sink_remote_write` is False |
| rxe | Linux 6.1 ends in a panic when a window that is void is invalidated, by this end or the other (rxe_invalidate_mw takes "free" for valid) | it has no windows: `windows_max` is 0 |
| rxe | sends Q_Keys with the highest bit as they are (IBTA 10.2.5 wants that of the queue pair) | that of the queue pair stands in the request, for every device |
| rxe | tells no asynchronous event when the other end breaks a rule of access | `access_errors_reported` is False |
"""  # noqa: E501 - a table

from __future__ import annotations

from typing import Final

# siw gives out offsets in pages from 0 on: 16384 completions of 48 bytes cover the first 192 pages, 0x90000 among them.
SIW_FILLER: Final = 16384  # completions


def is_siw(kernel_name: str) -> bool:
    return kernel_name.startswith("siw")


def is_rxe(kernel_name: str) -> bool:
    return kernel_name.startswith("rxe")
