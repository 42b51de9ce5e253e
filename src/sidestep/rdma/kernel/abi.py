"""What libibverbs and librdmacm have in memory: the structures of their headers, as far as they are used here.

Names of structures and fields are those of `infiniband/verbs.h` and `rdma/rdma_cma.h` of rdma-core, whose layout is the
ABI of the libraries (symbol versions IBVERBS_1.x and RDMACM_1.x). A test compares every offset with the headers.

- Structures that only the libraries make are declared up to the last field that is read, and end with `...`: what
  follows, such as a mutex, is none of our business and differs between machines.
- Functions that verbs.h defines inline (`ibv_post_send`, `ibv_poll_cq` and others) are called through the table of the
  device's context, `ContextOps`, as the header does it. Its entries named `_compat*` are never called.
"""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    Union,
    c_char,
    c_int,
    c_size_t,
    c_uint,
    c_uint8,
    c_uint16,
    c_uint32,
    c_uint64,
    c_void_p,
)
from typing import Any, Final

MW_TYPE_2: Final = 2
SRQ_LIMIT: Final = 1 << 1  # enum ibv_srq_attr_mask
TRANSPORT_IWARP: Final = 1  # enum ibv_transport_type
GID_ROCE_V2: Final = 2  # enum ibv_gid_type
LINK_LAYER_ETHERNET: Final = 2  # IBV_LINK_LAYER_ETHERNET
DEVICE_MEM_WINDOW_TYPE_2B: Final = 1 << 24  # enum ibv_device_cap_flags
ACCESS_LOCAL_WRITE: Final = 1
WC_WITH_IMM: Final = 1 << 1  # enum ibv_wc_flags
WC_WITH_INV: Final = 1 << 3
PS_TCP: Final = 0x0106  # enum rdma_port_space
OPTION_ID: Final = 0  # level of rdma_set_option
OPTION_ID_REUSEADDR: Final = 1
OPTION_ID_AFONLY: Final = 2


class SendFlags:
    """enum ibv_send_flags."""

    FENCE: Final = 1
    SIGNALED: Final = 2
    SOLICITED: Final = 4
    INLINE: Final = 8


class WrOpcode:
    """enum ibv_wr_opcode."""

    RDMA_WRITE: Final = 0
    RDMA_WRITE_WITH_IMM: Final = 1
    SEND: Final = 2
    SEND_WITH_IMM: Final = 3
    RDMA_READ: Final = 4
    LOCAL_INV: Final = 7
    BIND_MW: Final = 8
    SEND_WITH_INV: Final = 9


class QpMask:
    """enum ibv_qp_attr_mask."""

    STATE: Final = 1 << 0
    ACCESS_FLAGS: Final = 1 << 3
    PKEY_INDEX: Final = 1 << 4
    PORT: Final = 1 << 5
    QKEY: Final = 1 << 6
    AV: Final = 1 << 7  # the address vector
    PATH_MTU: Final = 1 << 8
    TIMEOUT: Final = 1 << 9
    RETRY_CNT: Final = 1 << 10
    RNR_RETRY: Final = 1 << 11
    RQ_PSN: Final = 1 << 12
    MAX_QP_RD_ATOMIC: Final = 1 << 13
    MIN_RNR_TIMER: Final = 1 << 15
    SQ_PSN: Final = 1 << 16
    MAX_DEST_RD_ATOMIC: Final = 1 << 17
    DEST_QPN: Final = 1 << 20


class RdmaCmEvent:
    """enum rdma_cm_event_type."""

    ADDR_RESOLVED: Final = 0
    ADDR_ERROR: Final = 1
    ROUTE_RESOLVED: Final = 2
    ROUTE_ERROR: Final = 3
    CONNECT_REQUEST: Final = 4
    CONNECT_RESPONSE: Final = 5
    CONNECT_ERROR: Final = 6
    UNREACHABLE: Final = 7
    REJECTED: Final = 8
    ESTABLISHED: Final = 9
    DISCONNECTED: Final = 10
    DEVICE_REMOVAL: Final = 11
    ADDR_CHANGE: Final = 14
    TIMEWAIT_EXIT: Final = 15


# ---- how structures are declared ----

_TYPES: Final[dict[str, Any]] = {
    "char": c_char, "int": c_int, "uint": c_uint, "u8": c_uint8, "u16": c_uint16, "u32": c_uint32, "u64": c_uint64,
    "size_t": c_size_t, "ptr": c_void_p,
}  # fmt: skip
STRUCTURES: Final[dict[str, tuple[type[Structure], bool]]] = {}  # class by C name; true: declared whole


def _fields(text: str) -> Iterator[tuple[str, Any]]:
    for declaration in text.split("; "):
        kind, names = declaration.split(" ", 1)
        for name in names.split(", "):
            plain, _, count = name.lstrip("*").partition("[")
            type_ = POINTER(_TYPES[kind]) if name.startswith("*") else _TYPES[kind]
            yield plain, type_ * int(count[:-1]) if count else type_


def _made(base: Any, name: str, text: str) -> Any:
    """Makes a structure of declarations as in C; later ones may name it."""
    _TYPES[name] = type(name, (base,), {"_fields_": list(_fields(text.removesuffix("; ...")))})
    return _TYPES[name]


def _union(name: str, text: str) -> type[Union]:
    made: type[Union] = _made(Union, name, text)
    return made


def _struct(name: str, text: str) -> type[Structure]:
    """Makes a structure of the headers; a name that begins with `_` is ours."""
    made: type[Structure] = _made(Structure, name, text)
    if not name.startswith("_"):
        STRUCTURES[f"struct {name}"] = made, not text.endswith("...")
    return made


# ---- libibverbs: objects ----

Gid = _union("ibv_gid", "u8 raw[16]; u64 whole[2]")  # the second one aligns it
GidEntry = _struct("ibv_gid_entry", "ibv_gid gid; u32 gid_index, port_num, gid_type, ndev_ifindex")
DeviceInfo = _struct("ibv_device", "ptr _ops[2]; int node_type, transport_type; char name[64], dev_name[64]; ...")
Sge = _struct("ibv_sge", "u64 addr; u32 length, lkey")
MwBindInfo = _struct("ibv_mw_bind_info", "ptr mr; u64 addr, length; uint mw_access_flags")
_struct("_rdma", "u64 remote_addr; u32 rkey")
_struct("_atomic", "u64 remote_addr, compare_add, swap; u32 rkey")  # size of the union
_struct("_ud", "ptr ah; u32 remote_qpn, remote_qkey")
_union("_wr", "_rdma rdma; _atomic atomic; _ud ud")
_struct("_bind_mw", "ptr mw; u32 rkey; ibv_mw_bind_info bind_info")
SendWr = _struct(
    "ibv_send_wr",
    "u64 wr_id; ptr next; ibv_sge *sg_list; int num_sge, opcode; uint send_flags; "
    "u32 invalidate_rkey; "  # or imm_data, of which it is a union
    "_wr wr; u32 qp_type; _bind_mw bind_mw",
)
RecvWr = _struct("ibv_recv_wr", "u64 wr_id; ptr next; ibv_sge *sg_list; int num_sge")
Wc = _struct(
    "ibv_wc",
    "u64 wr_id; int status, opcode; u32 vendor_err, byte_len; "
    "u32 invalidated_rkey; "  # or imm_data, of which it is a union
    "u32 qp_num, src_qp; uint wc_flags; u16 pkey_index, slid; u8 sl, dlid_path_bits",
)
# The functions that the header calls through the table; objects go by address.
_TYPES["post_send"] = CFUNCTYPE(c_int, c_void_p, POINTER(SendWr), POINTER(c_void_p))
_TYPES["post_recv"] = CFUNCTYPE(c_int, c_void_p, POINTER(RecvWr), POINTER(c_void_p))
_TYPES["poll_cq"] = CFUNCTYPE(c_int, c_void_p, c_int, POINTER(Wc))
_TYPES["req_notify_cq"] = CFUNCTYPE(c_int, c_void_p, c_int)
_TYPES["alloc_mw"] = CFUNCTYPE(c_void_p, c_void_p, c_int, use_errno=True)
_TYPES["dealloc_mw"] = CFUNCTYPE(c_int, c_void_p)
ContextOps = _struct(
    "ibv_context_ops",
    "ptr _compat_pd_mr[7]; alloc_mw alloc_mw; ptr bind_mw; dealloc_mw dealloc_mw; ptr _compat_create_cq; "
    "poll_cq poll_cq; req_notify_cq req_notify_cq; ptr _compat_cq_srq[7]; post_recv post_srq_recv; ptr _compat_qp[4]; "
    "post_send post_send; post_recv post_recv; ptr _compat_ah[5]",
)
Context = _struct("ibv_context", "ibv_device *device; ibv_context_ops ops; int cmd_fd, async_fd, num_comp_vectors; ...")
Mr = _struct("ibv_mr", "ptr context, pd, addr; size_t length; u32 handle, lkey, rkey")
Mw = _struct("ibv_mw", "ptr context, pd; u32 rkey, handle; int type")
CompChannel = _struct("ibv_comp_channel", "ptr context; int fd, refcnt")
Qp = _struct(
    "ibv_qp", "ptr context, qp_context, pd, send_cq, recv_cq, srq; u32 handle, qp_num; int state, qp_type; ..."
)
Cq = _struct("ibv_cq", "ptr context, channel, cq_context; u32 handle; int cqe; ...")

# ---- libibverbs: attributes ----

DeviceAttr = _struct(
    "ibv_device_attr",
    "char fw_ver[64]; u64 node_guid, sys_image_guid, max_mr_size, page_size_cap; "
    "u32 vendor_id, vendor_part_id, hw_ver; int max_qp, max_qp_wr; uint device_cap_flags; "
    "int max_sge, max_sge_rd, max_cq, max_cqe, max_mr, max_pd, max_qp_rd_atom, max_ee_rd_atom, max_res_rd_atom, "
    "max_qp_init_rd_atom, max_ee_init_rd_atom, atomic_cap, max_ee, max_rdd, max_mw, max_raw_ipv6_qp, max_raw_ethy_qp, "
    "max_mcast_grp, max_mcast_qp_attach, max_total_mcast_qp_attach, max_ah, max_fmr, max_map_per_fmr, max_srq, "
    "max_srq_wr, max_srq_sge; u16 max_pkeys; "
    "u8 local_ca_ack_delay, phys_port_cnt",
)
PortAttr = _struct(  # the exported `ibv_query_port` fills it up to `link_layer`; what the inline one adds stays 0
    "ibv_port_attr",
    "int state, max_mtu, active_mtu, gid_tbl_len; u32 port_cap_flags, max_msg_sz, bad_pkey_cntr, qkey_viol_cntr; "
    "u16 pkey_tbl_len, lid, sm_lid; u8 lmc, max_vl_num, sm_sl, subnet_timeout, init_type_reply, active_width, "
    "active_speed, phys_state, link_layer, flags; u16 port_cap_flags2",
)
_union("_element", "ptr object; int port_num")
AsyncEventRecord = _struct("ibv_async_event", "_element element; int event_type")
SrqAttr = _struct("ibv_srq_attr", "u32 max_wr, max_sge, srq_limit")
SrqInitAttr = _struct("ibv_srq_init_attr", "ptr srq_context; ibv_srq_attr attr")
QpCap = _struct("ibv_qp_cap", "u32 max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data")
QpInitAttr = _struct(
    "ibv_qp_init_attr", "ptr qp_context, send_cq, recv_cq, srq; ibv_qp_cap cap; int qp_type, sq_sig_all"
)
_struct("ibv_global_route", "ibv_gid dgid; u32 flow_label; u8 sgid_index, hop_limit, traffic_class")
AhAttr = _struct(
    "ibv_ah_attr", "ibv_global_route grh; u16 dlid; u8 sl, src_path_bits, static_rate, is_global, port_num"
)
QpAttr = _struct(
    "ibv_qp_attr",
    "int qp_state, cur_qp_state, path_mtu, path_mig_state; u32 qkey, rq_psn, sq_psn, dest_qp_num; "
    "uint qp_access_flags; ibv_qp_cap cap; ibv_ah_attr ah_attr, alt_ah_attr; u16 pkey_index, alt_pkey_index; "
    "u8 en_sqd_async_notify, sq_draining, max_rd_atomic, max_dest_rd_atomic, min_rnr_timer, port_num, timeout, "
    "retry_cnt, rnr_retry, alt_port_num, alt_timeout; u32 rate_limit",
)

# ---- librdmacm ----

EventChannel = _struct("rdma_event_channel", "int fd")
_struct("_ib_addr", "ibv_gid sgid, dgid; u16 pkey")
_struct("rdma_addr", "u8 src_storage[128], dst_storage[128]; _ib_addr addr")
_struct("rdma_route", "rdma_addr addr; ptr path_rec; int num_paths")
CmId = _struct(
    "rdma_cm_id",
    "ibv_context *verbs; ptr channel, context, qp; rdma_route route; int ps; u8 port_num; "
    "ptr event, send_cq_channel, send_cq, recv_cq_channel, recv_cq, srq, pd; int qp_type",
)
ConnParam = _struct(
    "rdma_conn_param",
    "ptr private_data; u8 private_data_len, responder_resources, initiator_depth, flow_control, retry_count, "
    "rnr_retry_count, srq; u32 qp_num",
)
_struct("_ud_param", "ptr private_data; u8 private_data_len; ibv_ah_attr ah_attr; u32 qp_num, qkey")  # for size
_union("_param", "rdma_conn_param conn; _ud_param ud")
CmEvent = _struct("rdma_cm_event", "ptr id, listen_id; int event, status; _param param")
