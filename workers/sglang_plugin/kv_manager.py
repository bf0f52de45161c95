"""SGLang's KV manager, sender and receiver on top of :mod:`tpla.workers.transfer`.

SGLang's ``CommonKV*`` classes give the bootstrap server, rank mapping and request status; ours
carry pages, time-outs, leases and aborts. A request is a *room*; SGLang polls its status from the
scheduler loop.
"""

from __future__ import annotations

import ctypes
import threading
import time
from pathlib import Path
from typing import Any

import requests
import torch
from sglang.srt.disaggregation.base.conn import KVPoll, KVTransferMetric
from sglang.srt.disaggregation.common.conn import (
    CommonKVBootstrapServer,
    CommonKVManager,
    CommonKVReceiver,
    CommonKVSender,
    KVTransferError,
    PrefillServerInfo,
)
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.utils.network import NetworkAddress

from tpla.core.checkpoint import fingerprint
from tpla.core.config import Transfer, WorkerConfig
from tpla.core.errors import TransferError
from tpla.workers.sglang_plugin.model_settings import settings_digest
from tpla.workers.transfer.faults import FaultySendingPlane
from tpla.workers.transfer.group_plane import GroupReceivingPlane, GroupSendingPlane
from tpla.workers.transfer.message_plane import MessageReceivingPlane, MessageSendingPlane
from tpla.workers.transfer.pool_access import decode_pages, prefill_pages
from tpla.workers.transfer.protocol import (
    Identity,
    Link,
    ReceivingPlane,
    Reservation,
    SendingPlane,
)
from tpla.workers.transfer.pusher import Written
from tpla.workers.transfer.receiver import DecodeReceiver
from tpla.workers.transfer.sender import PrefillSender
from tpla.workers.transfer.zmq_link import ZmqClientLink, ZmqServerLink

_FETCH_PATIENCE_SECONDS = 0.2
_REASON_PATIENCE_SECONDS = 0.5
_REASON_POLL_SECONDS = 0.002
_IMPATIENCE_SECONDS = 1.0


class TplaKVManager(CommonKVManager):
    """One a rank. The transfer starts when :meth:`attach` hands over the pool."""

    sender: PrefillSender
    receiver: DecodeReceiver

    def __init__(
        self, args: Any, disaggregation_mode: Any, server_args: Any, is_mla_backend: bool = False
    ) -> None:
        super().__init__(args, disaggregation_mode, server_args, is_mla_backend)
        self.server_socket.close(linger=0)  # ours carries both directions
        self.room_metadata: dict[int, int] = {}
        self._impatient_until = 0.0
        self._fetching: dict[str, threading.Thread] = {}
        self._addresses_of_peer: dict[str, set[str]] = {}
        if self.system_dp_size > 1:
            # Replicas: SGLang tells them apart here, and asks for the other rank in its senders.
            self.attn_dp_rank = self.system_dp_rank

    def register_to_bootstrap(self) -> None:
        """Prefill: bind our own socket first, so that its port is the one that is registered."""
        self.link = ZmqServerLink(self.local_ip)
        self.rank_port = self.link.port
        super().register_to_bootstrap()

    def attach(self, config: WorkerConfig, pool: Any, scheduler: Any) -> None:
        """Start to serve transfers of ``pool``, which ``scheduler`` gives to requests."""
        model_config = scheduler.model_config
        self.identity = Identity(
            instance_id=f"{config.instance_id}/{self.kv_args.engine_rank}",
            fingerprint=f"{fingerprint(Path(config.model))}/{settings_digest(model_config)}",
            metadata_bytes=sum(self.kv_args.aux_item_lens),
            kv_lora_rank=model_config.kv_lora_rank,
            qk_rope_head_dim=model_config.qk_rope_head_dim,
        )
        self.timeouts = config.timeouts
        self._forward_stream = scheduler.forward_stream if pool.kv_buffer[0].is_cuda else None
        if self.disaggregation_mode == DisaggregationMode.PREFILL:
            plane = _sending_plane(config, self.link, pool)
            self.sender = PrefillSender(self.link, plane, self.identity, config.timeouts, self)
        else:
            link = ZmqClientLink(self.identity.instance_id)
            self.receiver = DecodeReceiver(
                link,
                _receiving_plane(config, link, pool),
                self.identity,
                config.timeouts,
                self,
                self._on_peer_lost,
            )

    def begun_work(self) -> torch.cuda.Event | None:
        """Marks the end of what the engine has asked of the device so far; None on a CPU."""
        if self._forward_stream is None:
            return None
        event = torch.cuda.Event()
        event.record(self._forward_stream)
        return event

    def accounting(self) -> dict[str, Any]:
        """What this rank holds for transfers; all zero when idle, but for peers and totals."""
        tracked = getattr(self, "addr_to_rooms_tracker", {})
        return {
            **self._half.accounting(),
            "statuses": len(self.request_status),
            "failure_records": len(self.failure_records),
            "tracked_rooms": sum(len(rooms) for rooms in tracked.values()),
        }

    def close(self) -> None:
        """End every transfer, and let the peers know."""
        self._half.close()

    @property
    def _half(self) -> PrefillSender | DecodeReceiver:
        return self.sender if hasattr(self, "sender") else self.receiver

    # ---- room events, from the link's thread

    def on_ready(self, room: int, decode_prefix_len: int) -> None:
        """Prefill: every decode rank has reserved."""
        self.req_to_decode_prefix_len[room] = decode_prefix_len
        self.update_status(room, KVPoll.WaitingForInput)

    def on_done(self, room: int, metadata: bytes) -> None:
        """The rows are in the decode pool and verified; decode also gets the first token."""
        index = self.room_metadata.pop(room, None)
        if index is not None:
            self._write_metadata(index, metadata)
        self.update_status(room, KVPoll.Success)

    def on_failed(self, room: int, error: TransferError) -> None:
        """The room is given up."""
        self.room_metadata.pop(room, None)
        if room in self.request_status:
            self.record_failure(room, f"{type(error).__name__}: {error}")
            self.update_status(room, KVPoll.Failed)

    def take_reason(self, room: int) -> str | None:
        """Why the room failed, None when only another rank knows.

        The first rank answers the client, and prefill's word of another rank's failure may be on
        its way to it. That is worth a moment of this scheduler's time, on a busy host half a
        second, since a request that fails without a reason cannot be explained to anybody. Where it
        was waited for in vain, many rooms may have failed at once: the next ones do not wait.
        """
        now = time.monotonic()
        deadline = now if now < self._impatient_until else now + _REASON_PATIENCE_SECONDS
        while room not in self.failure_records and time.monotonic() < deadline:
            time.sleep(_REASON_POLL_SECONDS)
        with self.failure_lock:
            reason = self.failure_records.pop(room, None)
        if reason is None and deadline > now:
            self._impatient_until = time.monotonic() + _IMPATIENCE_SECONDS
        return reason

    # ---- metadata of the first token

    def read_metadata(self, index: int) -> bytes:
        """Prefill: SGLang's metadata buffers at ``index``, one after another."""
        return b"".join(
            ctypes.string_at(pointer + index * size, size)
            for pointer, size in zip(
                self.kv_args.aux_data_ptrs, self.kv_args.aux_item_lens, strict=True
            )
        )

    def _write_metadata(self, index: int, metadata: bytes) -> None:
        offset = 0
        for pointer, size in zip(
            self.kv_args.aux_data_ptrs, self.kv_args.aux_item_lens, strict=True
        ):
            ctypes.memmove(pointer + index * size, metadata[offset : offset + size], size)
            offset += size

    # ---- prefill topology, fetched off the scheduler's thread

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """Whether the prefill server's topology is known; fetches it in the background.

        SGLang's own version raises in the scheduler when page size or dtype differ, which ends the
        worker; here the handshake checks what matters and fails the request.
        """
        if bootstrap_addr in self.prefill_info_table:
            return True
        thread = self._fetching.get(bootstrap_addr)
        if thread is None or not thread.is_alive():
            thread = threading.Thread(
                target=self._fetch_parallel_info, args=(bootstrap_addr,), daemon=True
            )
            self._fetching[bootstrap_addr] = thread
            thread.start()
        thread.join(_FETCH_PATIENCE_SECONDS)
        return bootstrap_addr in self.prefill_info_table

    def _fetch_parallel_info(self, bootstrap_addr: str) -> None:
        query = "prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"
        try:
            response = requests.get(
                f"http://{bootstrap_addr}/route?{query}", timeout=self.timeouts.handshake
            )
            response.raise_for_status()
            info = PrefillServerInfo(**response.json())
        except (requests.RequestException, ValueError, TypeError):
            return  # SGLang asks again, and fails the request in the end
        self._resolve_rank_mapping(info)
        self.prefill_info_table[bootstrap_addr] = info

    def remember_peer(self, endpoint: str, bootstrap_addr: str) -> None:
        """Decode: which server an endpoint belongs to, to forget both together."""
        self._addresses_of_peer.setdefault(endpoint, set()).add(bootstrap_addr)

    def _on_peer_lost(self, endpoint: str) -> None:
        """A prefill rank is gone: ask its address anew, a successor may stand there."""
        for bootstrap_addr in self._addresses_of_peer.pop(endpoint, set()):
            self.prefill_info_table.pop(bootstrap_addr, None)
            with self.connection_lock:
                for key in [k for k in self.connection_pool if k.startswith(bootstrap_addr)]:
                    del self.connection_pool[key]


def _sending_plane(config: WorkerConfig, link: Link, pool: Any) -> SendingPlane:
    source = prefill_pages(pool)
    plane: SendingPlane = MessageSendingPlane(link, source)
    if config.transfer is Transfer.NCCL:
        plane = GroupSendingPlane(source, config.transfer.value, config.timeouts)
    return plane if config.fault is None else FaultySendingPlane(plane, config.fault)


def _receiving_plane(config: WorkerConfig, link: Link, pool: Any) -> ReceivingPlane:
    sink = decode_pages(pool)
    if config.transfer is Transfer.NCCL:
        return GroupReceivingPlane(sink, config.transfer.value, config.timeouts)
    return MessageReceivingPlane(link, sink)


class _Polled:
    """What sender and receiver share: status, and why it failed."""

    kv_mgr: TplaKVManager
    bootstrap_room: int
    conclude_state: int | None

    def poll(self) -> int:
        """SGLang's ``KVPoll`` of the room."""
        if self.conclude_state is not None:
            return self.conclude_state
        status = self.kv_mgr.request_status.get(self.bootstrap_room, KVPoll.Failed)
        if status in (KVPoll.Success, KVPoll.Failed):
            self.conclude_state = status
        return status

    def failure_exception(self) -> None:
        """Raise why the room failed; called on every rank when it failed on one."""
        self.conclude_state = KVPoll.Failed
        reason = self.kv_mgr.take_reason(self.bootstrap_room)
        self.clear()
        raise KVTransferError(
            self.bootstrap_room,
            reason or "failed on another rank",
            is_from_another_rank=reason is None,
        )

    def clear(self) -> None:
        """Forget the room."""
        raise NotImplementedError


class TplaKVSender(_Polled, CommonKVSender):
    """One request on one prefill rank."""

    _early_send_wait_event: Written | None = None
    """Set by SGLang before :meth:`send` of pages whose forward may still run."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not self.kv_mgr.is_dummy_cp_rank:  # decode never asks such a rank for rows
            self.kv_mgr.sender.open(self.bootstrap_room)

    def send(self, kv_indices: Any, state_indices: Any = None) -> None:
        """Push pages of chunks before, or of a cached prefix that later ones build on."""
        written, self._early_send_wait_event = self._early_send_wait_event, None
        pages, place, is_last, skip = self._prepare_send_indices(kv_indices, state_indices)
        if skip:
            return
        metadata = self.kv_mgr.read_metadata(self.aux_index) if is_last else None
        self.kv_mgr.sender.push(self.bootstrap_room, place.start, pages, metadata, written)

    def abort(self) -> None:
        """SGLang gives the request up: tell decode, stop pushing."""
        room, manager = self.bootstrap_room, self.kv_mgr
        reason = "the request was aborted on prefill"
        manager.sender.abort(room, reason)
        self.conclude_state = KVPoll.Failed
        if room in manager.request_status and room not in manager.failure_records:
            manager.record_failure(room, reason)  # the room was over: no event says so

    def get_transfer_metric(self) -> KVTransferMetric:
        """Bytes that were on the wire and the time they took; SGLang reports both."""
        return self._transfer_metric

    def clear(self) -> None:
        """Forget the room; a room that is not over is aborted first."""
        payload_bytes, seconds = self.kv_mgr.sender.transferred(self.bootstrap_room)
        if payload_bytes:
            self._transfer_metric = KVTransferMetric(
                transfer_latency_s=seconds, transfer_total_bytes=payload_bytes
            )
        self.kv_mgr.sender.abort(self.bootstrap_room, "failed on another prefill rank")
        self.kv_mgr.sender.forget(self.bootstrap_room)
        self.kv_mgr.failure_records.pop(self.bootstrap_room, None)
        CommonKVSender.clear(self)


class TplaKVReceiver(_Polled, CommonKVReceiver):
    """One request on one decode rank."""

    def init(self, prefill_dp_rank: int) -> None:
        """Resolve the prefill ranks, greet them, and keep the request's lease alive."""
        if self.conclude_state is not None:
            return
        try:
            super().init(prefill_dp_rank)
        except KeyError:  # the link's thread has just found that prefill is gone
            self._conclude_failed(f"prefill at {self.bootstrap_addr} is gone")
        if self.conclude_state is None:
            endpoints = [self._endpoint(info) for info in self.bootstrap_infos]
            self.kv_mgr.receiver.expect(self.bootstrap_room, endpoints)
            for endpoint in endpoints:
                self.kv_mgr.remember_peer(endpoint, self.bootstrap_addr)
                self.kv_mgr.receiver.greet(endpoint)

    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: Any = None,
        decode_prefix_len: int | None = None,
    ) -> None:
        """Pages are allocated: reserve them with prefill."""
        assert aux_index is not None
        self.kv_mgr.room_metadata[self.bootstrap_room] = aux_index
        source, dummies = "", []
        for info in self.bootstrap_infos:
            if info["is_dummy"]:
                dummies.append(self._endpoint(info))
            else:
                source = self._endpoint(info)
        reservation = Reservation(
            pages=kv_indices,
            source=source,
            dummies=tuple(dummies),
            destinations=self.required_dst_info_num,
            decode_prefix_len=decode_prefix_len or 0,
            # A request that is found to have ended is still in the step after, which overlap has
            # begun by then: SGLang gives its pages away while that step writes one more row there.
            vacated=self.kv_mgr.begun_work(),
        )
        self.kv_mgr.receiver.reserve(self.bootstrap_room, reservation)

    def abort(self) -> None:
        """SGLang gives the request up; the same call comes on every rank.

        With pages reserved the room fails only when prefill has acknowledged, because SGLang frees
        the pages then. Without, it fails at once, and SGLang looks at ``conclude_state`` for it.
        """
        if self.bootstrap_room not in self.kv_mgr.room_metadata:
            self._conclude_failed("the request was aborted on decode")
        self.kv_mgr.receiver.abort(self.bootstrap_room, "the request was aborted on decode")

    def clear(self) -> None:
        """Forget the room; SGLang frees its pages next, so no byte may land from here on."""
        self.kv_mgr.room_metadata.pop(self.bootstrap_room, None)
        self.kv_mgr.receiver.fence(self.bootstrap_room)
        self.kv_mgr.receiver.forget(self.bootstrap_room)
        self.kv_mgr.addr_to_rooms_tracker[self.bootstrap_addr].discard(self.bootstrap_room)
        self.kv_mgr.failure_records.pop(self.bootstrap_room, None)
        CommonKVReceiver.clear(self)

    def _conclude_failed(self, reason: str) -> None:
        """The room fails at once: no pages are reserved, so there is nobody to wait for."""
        self.kv_mgr.record_failure(self.bootstrap_room, reason)
        self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Failed)
        self.conclude_state = KVPoll.Failed

    @staticmethod
    def _endpoint(bootstrap_info: dict[str, Any]) -> str:
        return NetworkAddress(bootstrap_info["rank_ip"], bootstrap_info["rank_port"]).to_tcp()


class TplaKVBootstrapServer(CommonKVBootstrapServer):
    """SGLang's own: where decode finds prefill's ranks."""
