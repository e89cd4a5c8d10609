"""ZMQ streams as engines send them: SGLang's forward-pass metrics, vLLM's and SGLang's KV events."""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np
import zmq

from ..engine.engine import Engine
from ..engine.errors import DsimError
from ..engine.jit import rule
from ..engine.prefix import Cache, Prefixes
from ..engine.step import Phase
from .listeners import EndedStep

FPM_VERSION = 1  # of Dynamo's ForwardPassMetrics
HEARTBEAT = 1.0  # real s between an idle engine's messages
REPLAY_LOOK = 0.1  # s between looks for replay requests, as in vLLM
KEPT = 10_000  # messages kept to send or replay; more are dropped, as in SGLang
REPLAYED = (-1).to_bytes(8, "big", signed=True)  # sequence number after a replay's last message
_HASH = (1 << 64) - 1


class Publisher:
    """A PUB socket and a thread that sends numbered messages: topic, number, msgpack."""

    def __init__(
        self, option: str, endpoint: str, most: int, idle: Callable[[], Any] | None = None, replay: str | None = None
    ) -> None:  # fmt: skip
        """idle: makes what an idle engine repeats. replay: address to ask for past messages."""
        self._queue: queue.Queue[Any] = queue.Queue(KEPT)
        self._make_idle = idle
        self.idle = True
        self._socket: Any = zmq.Context.instance().socket(zmq.PUB)
        self._socket.set_hwm(most)
        try:
            # As in engines: bind to a wildcard or a file, connect to a subscriber.
            if (
                option == "--kv-events"
                and endpoint.startswith("tcp://")
                and "*" not in endpoint
                and "::" not in endpoint
            ):
                self._socket.connect(endpoint)
            else:
                self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._socket.close(0)
            raise DsimError(f"{option} is {endpoint}: {error.strerror}") from None
        self._replay: Any = None
        self._past: deque[tuple[int, bytes]] = deque(maxlen=KEPT)
        if replay is not None:
            self._replay = zmq.Context.instance().socket(zmq.ROUTER)
            try:
                self._replay.bind(replay)
            except zmq.ZMQError as error:
                for opened in (self._socket, self._replay):
                    opened.close(0)
                raise DsimError(f"{option}-replay is {replay}: {error.strerror}") from None
        self._thread = threading.Thread(target=self._run, name=f"zmq {endpoint}", daemon=True)
        self._thread.start()

    def put(self, message: Any) -> None:
        """Drop the message if the queue is full."""
        try:
            self._queue.put_nowait(message)
        except queue.Full:
            return

    def close(self) -> None:
        """First send what is queued, for at most 1 s."""
        try:
            self._queue.put(None, timeout=1.0)
        except queue.Full:
            return
        self._thread.join(1.0)

    def _run(self) -> None:
        number, last = 0, time.monotonic()
        while True:
            while self._replay is not None and self._replay.poll(0):
                self._send_again(self._replay.recv_multipart())
            try:
                message = self._queue.get(timeout=HEARTBEAT if self._replay is None else REPLAY_LOOK)
            except queue.Empty:
                if self._make_idle is None or not self.idle or time.monotonic() - last < HEARTBEAT:
                    continue
                message = self._make_idle()
            if message is None:
                break
            if isinstance(message, dict):
                message["counter_id"] = number
            data = msgspec.msgpack.encode(message)
            self._socket.send_multipart((b"", number.to_bytes(8, "big"), data))
            if self._replay is not None:
                self._past.append((number, data))
            number, last = number + 1, time.monotonic()
        self._socket.close(1000)
        if self._replay is not None:
            self._replay.close(1000)

    def _send_again(self, frames: list[bytes]) -> None:
        """Send messages from the asked number on, as vLLM's _service_replay (distributed/kv_events.py)."""
        if len(frames) != 3:
            return
        client, _, first = frames
        for number, data in self._past:
            if number >= int.from_bytes(first, "big"):
                self._replay.send_multipart((client, b"", b"", number.to_bytes(8, "big"), data))
        self._replay.send_multipart((client, b"", b"", REPLAYED, b""))


def endpoint_of(option: str, base: str, rank: int) -> str:
    """Each replica's stream has the next port or file."""
    scheme, _, rest = base.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme == "ipc" and rest:
        return f"{base}.{rank}"
    if scheme == "tcp" and host and port.isdigit() and 0 < int(port) + rank < 1 << 16:
        return f"tcp://{host}:{int(port) + rank}"
    raise DsimError(f"{option} is {base}, expected ipc://FILE or tcp://HOST:PORT")


class ForwardPassMetrics:
    """Per step: device time, rows and queue. A diffusion model's rows count as prefill."""

    SCHEDULED: ClassVar[dict[str, float]] = dict.fromkeys(
        (
            "num_prefill_requests", "sum_prefill_tokens", "var_prefill_length", "sum_prefill_kv_tokens",
            "num_decode_requests", "sum_decode_kv_tokens", "var_decode_kv_tokens",
        ), 0,
    )  # fmt: skip
    QUEUED: ClassVar[dict[str, float]] = {k: v for k, v in SCHEDULED.items() if k != "sum_prefill_kv_tokens"}

    def __init__(self, base: str, rank: int) -> None:
        self._rank = rank
        endpoint = endpoint_of("--forward-pass-metrics", base, rank)
        self._publisher = Publisher("--forward-pass-metrics", endpoint, 1000, lambda: self._message(0.0, {}, {}))

    def __str__(self) -> str:
        return "stream of forward-pass metrics"

    def step(self, ended: EndedStep) -> None:
        plan, by_token = ended.plan, ended.engine.policy.rows.commits == "tokens"
        decodes = np.full(len(plan.requests), by_token) & (plan.phases != Phase.PREFILL)
        prompts, decoded = plan.prompt[~decodes], plan.num_keys[decodes]
        scheduled = {
            "num_prefill_requests": len(prompts), "sum_prefill_tokens": int(plan.num_tokens[~decodes].sum()),
            "var_prefill_length": _variance(prompts),
            "sum_prefill_kv_tokens": int((plan.num_keys - plan.num_tokens)[~decodes].sum()),
            "num_decode_requests": len(decoded), "sum_decode_kv_tokens": int(decoded.sum()),
            "var_decode_kv_tokens": _variance(decoded),
        }  # fmt: skip
        queued = {
            "num_prefill_requests": len(ended.queued), "sum_prefill_tokens": sum(ended.queued),
            "var_prefill_length": _variance(ended.queued),
        }  # fmt: skip
        self._publisher.idle = ended.engine.idle
        self._publisher.put(self._message(ended.device, scheduled, queued))

    def emptied(self, at_once: bool) -> None:
        """Nothing to send."""

    def close(self) -> None:
        self._publisher.close()

    def _message(self, seconds: float, scheduled: dict[str, float], queued: dict[str, float]) -> dict[str, Any]:
        return {
            "version": FPM_VERSION, "worker_id": "", "dp_rank": self._rank, "counter_id": 0, "wall_time": seconds,
            "scheduled_requests": self.SCHEDULED | scheduled, "queued_requests": self.QUEUED | queued,
        }  # fmt: skip


class KvEvents:
    """Pages that the prefix cache stored or evicted, by hash; token ids stay empty."""

    def __init__(
        self, base: str, rank: int, engine: Engine, prefixes: Prefixes, release: str, replay: str | None = None
    ) -> None:
        """release: "sglang" for its fields, otherwise vLLM's. replay: base of the addresses for past events."""
        self._rank, self._prefixes, self._sglang = rank, prefixes, release == "sglang"
        again = None if replay is None else endpoint_of("--kv-events-replay", replay, rank)
        self._publisher = Publisher("--kv-events", endpoint_of("--kv-events", base, rank), 100_000, replay=again)
        self._count = len(cache_of(engine).entries)
        self._pages = Pages(self._count)
        self._cleared: list[dict[str, Any]] = []  # sent with the next step's

    def __str__(self) -> str:
        return "stream of KV events"

    def step(self, ended: EndedStep) -> None:
        stored, removed = self._pages.changes(cache_of(ended.engine))
        events, self._cleared = self._cleared, []
        if not stored and not removed and not events:
            return
        events += [
            {"type": "BlockRemoved", "block_hashes": [key & _HASH], "medium": "GPU"} | self._own(group)
            for key, group in removed
        ]
        parents = self._parents(ended)
        for key, group in stored:
            parent = parents.get(key)
            events.append({
                "type": "BlockStored", "block_hashes": [key & _HASH],
                "parent_block_hash": None if parent is None else parent & _HASH, "token_ids": [],
                "block_size": self._prefixes.block, "lora_id": None, "medium": "GPU",
                **({} if self._sglang else {"lora_name": None}), **self._own(group),
            })  # fmt: skip
        self._publisher.put([time.time(), events, self._rank])

    def emptied(self, at_once: bool) -> None:
        """Send AllBlocksCleared: at once, as SGLang's idle loop, or with the next step's events, as vLLM."""
        self._pages, self._cleared = Pages(self._count), [{"type": "AllBlocksCleared"}]
        if at_once:
            self._publisher.put([time.time(), self._cleared, self._rank])
            self._cleared = []

    def close(self) -> None:
        self._publisher.close()

    def _own(self, group: int) -> dict[str, int]:
        """The fields of vLLM alone."""
        return {} if self._sglang else {"group_idx": group}

    def _parents(self, ended: EndedStep) -> dict[int, int]:
        """By key of each page of the step's requests: the key of the page before."""
        found: dict[int, int] = {}
        for request, end in zip(ended.plan.requests.tolist(), ended.plan.end.tolist(), strict=True):
            named = self._prefixes.of(request).tolist()
            # Pages beyond the prompt belong to one request.
            own = [-1 - ((request << 32) + page) for page in range(len(named), end // self._prefixes.block)]
            keys = named + own
            found.update(zip(keys[1:], keys, strict=False))
        return found


def cache_of(engine: Engine) -> Cache:
    """Raises DsimError if there is none."""
    if engine.prefix_cache is None:
        raise DsimError(
            f"policy {engine.policy.name} keeps no prefix cache for --kv-events, expected prefix_caching=true"
        )
    return engine.prefix_cache


class Pages:
    """Pages in a prefix cache, step by step."""

    def __init__(self, count: int) -> None:
        self._used = np.zeros(count, np.bool_)
        self._keys = np.zeros(count, np.int64)
        self._groups = np.zeros(count, np.int32)

    def changes(self, cache: Cache) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Pages stored and removed since the last call: (key, group of layers)."""
        entries: Any = cache.entries
        keys, groups, used = entries["key"], entries["group"], entries["refs"] > 0
        _mark_idle(cache, used)
        changed = (keys != self._keys) | (groups != self._groups)
        gone = np.flatnonzero(self._used & (~used | changed))
        new = np.flatnonzero(used & (~self._used | changed))
        removed = list(zip(self._keys[gone].tolist(), self._groups[gone].tolist(), strict=True))
        self._keys[new], self._groups[new], self._used = keys[new], groups[new], used
        return list(zip(keys[new].tolist(), groups[new].tolist(), strict=True)), removed


@rule
def _mark_idle(cache: Cache, marks: Any) -> None:
    """Mark unused pages that are kept for reuse."""
    at = int(cache.pool[0].oldest)
    while at >= 0:
        marks[at] = True
        at = int(cache.entries[at].newer)


def _variance(values: Sequence[int] | Any) -> float:
    return float(np.var(values)) if len(values) else 0.0
