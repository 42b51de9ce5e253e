"""What libibverbs and librdmacm have in memory: the structures of their headers, as far as they are used here.

Names of structures and fields are those of `infiniband/verbs.h` and `rdma/rdma_cma.h` of rdma-core, whose layout is the
ABI of the libraries (symbol versions IBVERBS_1.x and RDMACM_1.x); each class says in `C_NAME` which structure it is. A
test compares every offset with the headers.

- Structures that only the libraries make are declared up to the last field that is read (`WHOLE` is False): what
  follows, such as a mutex, is none of our business and differs between machines.
- Functions that verbs.h defines inline (`ibv_post_send`, `ibv_poll_cq` and others) are called through the table of the
  device's context, `ContextOps`, as the header does it. Its entries named `_compat_*` are never called.
"""

# ruff: noqa: D101 - C_NAME says what each is
from __future__ import annotations

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
from typing import Any, ClassVar, Final

_NAME_MAX: Final = 64  # IBV_SYSFS_NAME_MAX
_SOCKADDR_STORAGE: Final = 128  # bytes of struct sockaddr_storage

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


class CmKind:
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


class _Abi(Structure):
    """A structure of the headers."""

    C_NAME: ClassVar[str]
    WHOLE: ClassVar[bool] = True  # to its last field


# ---- libibverbs: objects ----


class Gid(Union):
    _fields_ = [("raw", c_uint8 * 16), ("whole", c_uint64 * 2)]  # the second one aligns it


class GidEntry(_Abi):
    C_NAME = "struct ibv_gid_entry"
    _fields_ = [
        ("gid", Gid),
        ("gid_index", c_uint32),
        ("port_num", c_uint32),
        ("gid_type", c_uint32),
        ("ndev_ifindex", c_uint32),
    ]


class DeviceInfo(_Abi):
    C_NAME = "struct ibv_device"
    WHOLE = False
    _fields_ = [
        ("_ops", c_void_p * 2),
        ("node_type", c_int),
        ("transport_type", c_int),
        ("name", c_char * _NAME_MAX),
        ("dev_name", c_char * _NAME_MAX),
    ]


class Sge(_Abi):
    C_NAME = "struct ibv_sge"
    _fields_ = [("addr", c_uint64), ("length", c_uint32), ("lkey", c_uint32)]


class _Rdma(Structure):
    _fields_ = [("remote_addr", c_uint64), ("rkey", c_uint32)]


class _Atomic(Structure):
    """Not used; it gives the union its size."""

    _fields_ = [("remote_addr", c_uint64), ("compare_add", c_uint64), ("swap", c_uint64), ("rkey", c_uint32)]


class _Ud(Structure):
    _fields_ = [("ah", c_void_p), ("remote_qpn", c_uint32), ("remote_qkey", c_uint32)]


class _Wr(Union):
    _fields_ = [("rdma", _Rdma), ("atomic", _Atomic), ("ud", _Ud)]


class MwBindInfo(_Abi):
    C_NAME = "struct ibv_mw_bind_info"
    _fields_ = [("mr", c_void_p), ("addr", c_uint64), ("length", c_uint64), ("mw_access_flags", c_uint)]


class _BindMw(Structure):
    _fields_ = [("mw", c_void_p), ("rkey", c_uint32), ("bind_info", MwBindInfo)]


class SendWr(_Abi):
    C_NAME = "struct ibv_send_wr"
    _fields_ = [
        ("wr_id", c_uint64),
        ("next", c_void_p),
        ("sg_list", POINTER(Sge)),
        ("num_sge", c_int),
        ("opcode", c_int),
        ("send_flags", c_uint),
        ("invalidate_rkey", c_uint32),  # or imm_data, of which it is a union
        ("wr", _Wr),
        ("qp_type", c_uint32),
        ("bind_mw", _BindMw),
    ]


class RecvWr(_Abi):
    C_NAME = "struct ibv_recv_wr"
    _fields_ = [("wr_id", c_uint64), ("next", c_void_p), ("sg_list", POINTER(Sge)), ("num_sge", c_int)]


class Wc(_Abi):
    C_NAME = "struct ibv_wc"
    _fields_ = [
        ("wr_id", c_uint64),
        ("status", c_int),
        ("opcode", c_int),
        ("vendor_err", c_uint32),
        ("byte_len", c_uint32),
        ("invalidated_rkey", c_uint32),  # or imm_data, of which it is a union
        ("qp_num", c_uint32),
        ("src_qp", c_uint32),
        ("wc_flags", c_uint),
        ("pkey_index", c_uint16),
        ("slid", c_uint16),
        ("sl", c_uint8),
        ("dlid_path_bits", c_uint8),
    ]


# The functions that the header calls through the table; objects go by address.
PostSend: Any = CFUNCTYPE(c_int, c_void_p, POINTER(SendWr), POINTER(c_void_p))
PostRecv: Any = CFUNCTYPE(c_int, c_void_p, POINTER(RecvWr), POINTER(c_void_p))
PollCq: Any = CFUNCTYPE(c_int, c_void_p, c_int, POINTER(Wc))
ReqNotifyCq: Any = CFUNCTYPE(c_int, c_void_p, c_int)
AllocMw: Any = CFUNCTYPE(c_void_p, c_void_p, c_int, use_errno=True)
DeallocMw: Any = CFUNCTYPE(c_int, c_void_p)


class ContextOps(_Abi):
    C_NAME = "struct ibv_context_ops"
    _fields_ = [
        ("_compat_query_device", c_void_p),
        ("_compat_query_port", c_void_p),
        ("_compat_alloc_pd", c_void_p),
        ("_compat_dealloc_pd", c_void_p),
        ("_compat_reg_mr", c_void_p),
        ("_compat_rereg_mr", c_void_p),
        ("_compat_dereg_mr", c_void_p),
        ("alloc_mw", AllocMw),
        ("bind_mw", c_void_p),
        ("dealloc_mw", DeallocMw),
        ("_compat_create_cq", c_void_p),
        ("poll_cq", PollCq),
        ("req_notify_cq", ReqNotifyCq),
        ("_compat_cq_event", c_void_p),
        ("_compat_resize_cq", c_void_p),
        ("_compat_destroy_cq", c_void_p),
        ("_compat_create_srq", c_void_p),
        ("_compat_modify_srq", c_void_p),
        ("_compat_query_srq", c_void_p),
        ("_compat_destroy_srq", c_void_p),
        ("post_srq_recv", PostRecv),
        ("_compat_create_qp", c_void_p),
        ("_compat_query_qp", c_void_p),
        ("_compat_modify_qp", c_void_p),
        ("_compat_destroy_qp", c_void_p),
        ("post_send", PostSend),
        ("post_recv", PostRecv),
        ("_compat_create_ah", c_void_p),
        ("_compat_destroy_ah", c_void_p),
        ("_compat_attach_mcast", c_void_p),
        ("_compat_detach_mcast", c_void_p),
        ("_compat_async_event", c_void_p),
    ]


class Context(_Abi):
    C_NAME = "struct ibv_context"
    WHOLE = False
    _fields_ = [
        ("device", POINTER(DeviceInfo)),
        ("ops", ContextOps),
        ("cmd_fd", c_int),
        ("async_fd", c_int),
        ("num_comp_vectors", c_int),
    ]


class Mr(_Abi):
    C_NAME = "struct ibv_mr"
    _fields_ = [
        ("context", c_void_p),
        ("pd", c_void_p),
        ("addr", c_void_p),
        ("length", c_size_t),
        ("handle", c_uint32),
        ("lkey", c_uint32),
        ("rkey", c_uint32),
    ]


class Mw(_Abi):
    C_NAME = "struct ibv_mw"
    _fields_ = [("context", c_void_p), ("pd", c_void_p), ("rkey", c_uint32), ("handle", c_uint32), ("type", c_int)]


class CompChannel(_Abi):
    C_NAME = "struct ibv_comp_channel"
    _fields_ = [("context", c_void_p), ("fd", c_int), ("refcnt", c_int)]


class Qp(_Abi):
    C_NAME = "struct ibv_qp"
    WHOLE = False
    _fields_ = [
        ("context", c_void_p),
        ("qp_context", c_void_p),
        ("pd", c_void_p),
        ("send_cq", c_void_p),
        ("recv_cq", c_void_p),
        ("srq", c_void_p),
        ("handle", c_uint32),
        ("qp_num", c_uint32),
        ("state", c_int),
        ("qp_type", c_int),
    ]


class Cq(_Abi):
    C_NAME = "struct ibv_cq"
    WHOLE = False
    _fields_ = [
        ("context", c_void_p),
        ("channel", c_void_p),
        ("cq_context", c_void_p),
        ("handle", c_uint32),
        ("cqe", c_int),
    ]


# ---- libibverbs: attributes ----


class DeviceAttr(_Abi):
    C_NAME = "struct ibv_device_attr"
    _fields_ = [
        ("fw_ver", c_char * 64),
        ("node_guid", c_uint64),
        ("sys_image_guid", c_uint64),
        ("max_mr_size", c_uint64),
        ("page_size_cap", c_uint64),
        ("vendor_id", c_uint32),
        ("vendor_part_id", c_uint32),
        ("hw_ver", c_uint32),
        ("max_qp", c_int),
        ("max_qp_wr", c_int),
        ("device_cap_flags", c_uint),
        ("max_sge", c_int),
        ("max_sge_rd", c_int),
        ("max_cq", c_int),
        ("max_cqe", c_int),
        ("max_mr", c_int),
        ("max_pd", c_int),
        ("max_qp_rd_atom", c_int),
        ("max_ee_rd_atom", c_int),
        ("max_res_rd_atom", c_int),
        ("max_qp_init_rd_atom", c_int),
        ("max_ee_init_rd_atom", c_int),
        ("atomic_cap", c_int),
        ("max_ee", c_int),
        ("max_rdd", c_int),
        ("max_mw", c_int),
        ("max_raw_ipv6_qp", c_int),
        ("max_raw_ethy_qp", c_int),
        ("max_mcast_grp", c_int),
        ("max_mcast_qp_attach", c_int),
        ("max_total_mcast_qp_attach", c_int),
        ("max_ah", c_int),
        ("max_fmr", c_int),
        ("max_map_per_fmr", c_int),
        ("max_srq", c_int),
        ("max_srq_wr", c_int),
        ("max_srq_sge", c_int),
        ("max_pkeys", c_uint16),
        ("local_ca_ack_delay", c_uint8),
        ("phys_port_cnt", c_uint8),
    ]


class PortAttr(_Abi):
    """The exported `ibv_query_port` fills it up to `link_layer`; the rest, which the inline one adds, stays 0."""

    C_NAME = "struct ibv_port_attr"
    _fields_ = [
        ("state", c_int),
        ("max_mtu", c_int),
        ("active_mtu", c_int),
        ("gid_tbl_len", c_int),
        ("port_cap_flags", c_uint32),
        ("max_msg_sz", c_uint32),
        ("bad_pkey_cntr", c_uint32),
        ("qkey_viol_cntr", c_uint32),
        ("pkey_tbl_len", c_uint16),
        ("lid", c_uint16),
        ("sm_lid", c_uint16),
        ("lmc", c_uint8),
        ("max_vl_num", c_uint8),
        ("sm_sl", c_uint8),
        ("subnet_timeout", c_uint8),
        ("init_type_reply", c_uint8),
        ("active_width", c_uint8),
        ("active_speed", c_uint8),
        ("phys_state", c_uint8),
        ("link_layer", c_uint8),
        ("flags", c_uint8),
        ("port_cap_flags2", c_uint16),
    ]


class _Element(Union):
    _fields_ = [("object", c_void_p), ("port_num", c_int)]


class AsyncEventRecord(_Abi):
    C_NAME = "struct ibv_async_event"
    _fields_ = [("element", _Element), ("event_type", c_int)]


class SrqAttr(_Abi):
    C_NAME = "struct ibv_srq_attr"
    _fields_ = [("max_wr", c_uint32), ("max_sge", c_uint32), ("srq_limit", c_uint32)]


class SrqInitAttr(_Abi):
    C_NAME = "struct ibv_srq_init_attr"
    _fields_ = [("srq_context", c_void_p), ("attr", SrqAttr)]


class QpCap(_Abi):
    C_NAME = "struct ibv_qp_cap"
    _fields_ = [
        ("max_send_wr", c_uint32),
        ("max_recv_wr", c_uint32),
        ("max_send_sge", c_uint32),
        ("max_recv_sge", c_uint32),
        ("max_inline_data", c_uint32),
    ]


class QpInitAttr(_Abi):
    C_NAME = "struct ibv_qp_init_attr"
    _fields_ = [
        ("qp_context", c_void_p),
        ("send_cq", c_void_p),
        ("recv_cq", c_void_p),
        ("srq", c_void_p),
        ("cap", QpCap),
        ("qp_type", c_int),
        ("sq_sig_all", c_int),
    ]


class GlobalRoute(_Abi):
    C_NAME = "struct ibv_global_route"
    _fields_ = [
        ("dgid", Gid),
        ("flow_label", c_uint32),
        ("sgid_index", c_uint8),
        ("hop_limit", c_uint8),
        ("traffic_class", c_uint8),
    ]


class AhAttr(_Abi):
    C_NAME = "struct ibv_ah_attr"
    _fields_ = [
        ("grh", GlobalRoute),
        ("dlid", c_uint16),
        ("sl", c_uint8),
        ("src_path_bits", c_uint8),
        ("static_rate", c_uint8),
        ("is_global", c_uint8),
        ("port_num", c_uint8),
    ]


class QpAttr(_Abi):
    C_NAME = "struct ibv_qp_attr"
    _fields_ = [
        ("qp_state", c_int),
        ("cur_qp_state", c_int),
        ("path_mtu", c_int),
        ("path_mig_state", c_int),
        ("qkey", c_uint32),
        ("rq_psn", c_uint32),
        ("sq_psn", c_uint32),
        ("dest_qp_num", c_uint32),
        ("qp_access_flags", c_uint),
        ("cap", QpCap),
        ("ah_attr", AhAttr),
        ("alt_ah_attr", AhAttr),
        ("pkey_index", c_uint16),
        ("alt_pkey_index", c_uint16),
        ("en_sqd_async_notify", c_uint8),
        ("sq_draining", c_uint8),
        ("max_rd_atomic", c_uint8),
        ("max_dest_rd_atomic", c_uint8),
        ("min_rnr_timer", c_uint8),
        ("port_num", c_uint8),
        ("timeout", c_uint8),
        ("retry_cnt", c_uint8),
        ("rnr_retry", c_uint8),
        ("alt_port_num", c_uint8),
        ("alt_timeout", c_uint8),
        ("rate_limit", c_uint32),
    ]


# ---- librdmacm ----


class EventChannel(_Abi):
    C_NAME = "struct rdma_event_channel"
    _fields_ = [("fd", c_int)]


class _IbAddress(Structure):
    _fields_ = [("sgid", Gid), ("dgid", Gid), ("pkey", c_uint16)]


class RdmaAddr(_Abi):
    C_NAME = "struct rdma_addr"
    _fields_ = [
        ("src_storage", c_uint8 * _SOCKADDR_STORAGE),
        ("dst_storage", c_uint8 * _SOCKADDR_STORAGE),
        ("addr", _IbAddress),
    ]


class Route(_Abi):
    C_NAME = "struct rdma_route"
    _fields_ = [("addr", RdmaAddr), ("path_rec", c_void_p), ("num_paths", c_int)]


class CmId(_Abi):
    C_NAME = "struct rdma_cm_id"
    _fields_ = [
        ("verbs", POINTER(Context)),
        ("channel", c_void_p),
        ("context", c_void_p),
        ("qp", c_void_p),
        ("route", Route),
        ("ps", c_int),
        ("port_num", c_uint8),
        ("event", c_void_p),
        ("send_cq_channel", c_void_p),
        ("send_cq", c_void_p),
        ("recv_cq_channel", c_void_p),
        ("recv_cq", c_void_p),
        ("srq", c_void_p),
        ("pd", c_void_p),
        ("qp_type", c_int),
    ]


class ConnParam(_Abi):
    C_NAME = "struct rdma_conn_param"
    _fields_ = [
        ("private_data", c_void_p),
        ("private_data_len", c_uint8),
        ("responder_resources", c_uint8),
        ("initiator_depth", c_uint8),
        ("flow_control", c_uint8),
        ("retry_count", c_uint8),
        ("rnr_retry_count", c_uint8),
        ("srq", c_uint8),
        ("qp_num", c_uint32),
    ]


class _UdParam(Structure):
    """Not used; it gives the union its size."""

    _fields_ = [
        ("private_data", c_void_p),
        ("private_data_len", c_uint8),
        ("ah_attr", AhAttr),
        ("qp_num", c_uint32),
        ("qkey", c_uint32),
    ]


class _EventParam(Union):
    _fields_ = [("conn", ConnParam), ("ud", _UdParam)]


class CmEvent(_Abi):
    C_NAME = "struct rdma_cm_event"
    _fields_ = [
        ("id", c_void_p),
        ("listen_id", c_void_p),
        ("event", c_int),
        ("status", c_int),
        ("param", _EventParam),
    ]


STRUCTURES: Final[tuple[type[_Abi], ...]] = (
    GidEntry, DeviceInfo, Sge, MwBindInfo, SendWr, RecvWr, Wc, ContextOps, Context, Mr, Mw, CompChannel, Qp, Cq,
    DeviceAttr, PortAttr, AsyncEventRecord, SrqAttr, SrqInitAttr, QpCap, QpInitAttr, GlobalRoute, AhAttr, QpAttr,
    EventChannel, RdmaAddr, Route, CmId, ConnParam, CmEvent,
)  # fmt: skip
