"""Message streams over ZMQ: forward-pass metrics and KV events, decoded into fixed fields."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import zmq

from ...engine.errors import DsimError, cut
from .sample import Heard

FPM_VERSION = 1
MOST_WAITING = 100_000  # messages that a socket keeps between two readings
MOST_MESSAGE = 16 << 20  # bytes
PATIENCE = 1000  # ms for a replay's next message
REPLAYED = (-1).to_bytes(8, "big", signed=True)  # the number after a replay's last message
REMEMBERED = 1_000_000  # hashes of blocks
GPU = "GPU"  # the tier of blocks that name no tier


class Scheduled(msgspec.Struct, frozen=True):
    """The requests of a forward: the fields that dsim reads of SGLang 0.5.23's forward_pass_metrics.py."""

    num_prefill_requests: int = 0
    sum_prefill_tokens: int = 0
    sum_prefill_kv_tokens: int = 0
    num_decode_requests: int = 0
    sum_decode_kv_tokens: int = 0


class Forward(msgspec.Struct, frozen=True):
    """A forward; all fields are 0 while the engine is idle."""

    version: int = FPM_VERSION
    wall_time: float = 0.0  # s
    scheduled_requests: Scheduled = Scheduled()


class BlockStored(msgspec.Struct, tag=True, frozen=True):
    """As in vLLM 0.33's and SGLang 0.5.23's kv_events.py. Token ids are private, and are not read."""

    block_hashes: list[int | bytes]
    block_size: int
    medium: str | None = None  # the tier of memory; None: the GPU's
    group_idx: int | None = None  # of layers; SGLang has no groups


class BlockRemoved(msgspec.Struct, tag=True, frozen=True):
    """Blocks that were evicted."""

    block_hashes: list[int | bytes]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, frozen=True):
    """The cache was emptied; dsim assumes all tiers. vLLM sends this with the events of its next step."""


class Batch(msgspec.Struct, array_like=True, frozen=True):
    """Events of one step."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


class Subscription:
    """The messages of one address, which a publisher numbers."""

    def __init__(self, option: str, address: str, kind: Any, replay: str | None = None) -> None:
        """replay: the address of the publisher's replay socket."""
        self._replay: Any = None if replay is None else zmq.Context.instance().socket(zmq.DEALER)
        self._name = f"{option} {address}"
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._next: int | None = None
        self.lost = ""  # why messages are missing since the last read
        self._socket: Any = zmq.Context.instance().socket(zmq.SUB)
        self._socket.set_hwm(MOST_WAITING)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MOST_MESSAGE)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        sockets: list[tuple[str, str, Any]] = [(option, address, self._socket)]
        sockets += [] if replay is None else [(f"{option}-replay", replay, self._replay)]
        for name, at, socket in sockets:
            try:
                socket.connect(at)
            except zmq.ZMQError as error:
                self.close()
                raise DsimError(
                    f"{name} is {cut(at)}, expected ipc://FILE or tcp://HOST:PORT: {error.strerror}"
                ) from None

    def read(self) -> Iterator[Any]:
        """The messages since the last call. A gap in their numbers, or bytes that do not decode, is a loss."""
        self.lost = ""
        while self._socket.poll(0):
            frames: list[bytes] = self._socket.recv_multipart()
            number, payload = [b"", b"", *frames][-2:]
            at = int.from_bytes(number[:8], "big")
            expected = self._next or 0
            again = self._past(expected, at) if at > expected and self._replay is not None else None
            if again is not None:
                yield from again
            elif at != expected:
                self.lose("is read anew" if self._next is None else f"sent message {at}, expected {self._next}")
            self._next = at + 1
            try:
                yield self._decoder.decode(payload)
            except (ValueError, msgspec.DecodeError) as error:
                self.lose(f"sent what is no message of its release: {cut(error)}")

    def _past(self, first: int, end: int) -> list[Any] | None:
        """The messages from `first` up to `end`, from vLLM's replay socket; None if some are lost."""
        while self._replay.poll(0):  # late answers to an earlier request
            self._replay.recv_multipart()
        found: dict[int, Any] = {}
        self._replay.send_multipart((b"", first.to_bytes(8, "big")))
        while self._replay.poll(PATIENCE):
            number, payload = self._replay.recv_multipart()[-2:]
            if number == REPLAYED:
                break
            try:
                found[int.from_bytes(number[:8], "big")] = self._decoder.decode(payload)
            except (ValueError, msgspec.DecodeError):
                return None
        whole = all(number in found for number in range(first, end))
        return [found[number] for number in range(first, end)] if whole else None

    def lose(self, why: str) -> None:
        """Record why messages are missing."""
        self.lost = self.lost or f"{self._name} {why}"

    def close(self) -> None:
        """Close the sockets."""
        self._socket.close(0)
        if self._replay is not None:
            self._replay.close(0)


class Streams:
    """The streams of all replicas.

    width: positions that a row of a diffusion model computes: its batches count as prefill. None: one token a row.
    """

    def __init__(
        self, forwards: Sequence[str], events: Sequence[str], width: int | None, replays: Sequence[str] = ()
    ) -> None:
        self._forwards = [Subscription("--forward-pass-metrics", address, Forward) for address in forwards]
        again: Sequence[str | None] = replays or [None] * len(events)
        self._events = [
            Subscription("--kv-events", address, Batch, replay) for address, replay in zip(events, again, strict=True)
        ]
        self._width = width
        # By replica: the copies of each block; a copy is a tier and a group of layers.
        self._held: list[dict[Any, set[Any]]] = [{} for _ in events]
        self._known: list[dict[Any, None]] = [{} for _ in events]  # hashes stored at any time

    def read(self) -> Heard:
        """The counts since the last call."""
        passes: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        for stream in self._forwards:
            for forward in stream.read():
                if forward.version == FPM_VERSION:
                    self._pass(forward, passes)
                else:
                    stream.lose(f"has version {forward.version}, expected {FPM_VERSION}")
        blocks = dict.fromkeys(("stored", "again", "removed", "cleared", "tokens"), 0.0)
        for index, stream in enumerate(self._events):
            for batch in stream.read():
                for event in batch.events:
                    self._event(index, event, blocks)
            if stream.lost:  # the cache's contents are unknown
                self._held[index].clear()
        lost = next((stream.lost for stream in (*self._forwards, *self._events) if stream.lost), "")
        held = {"held": float(sum(len(copies) for own in self._held for copies in own.values()))}
        return Heard(
            lost, tuple((rows, *found) for rows, found in sorted(passes.items())),
            blocks | held if self._events else {},
        )  # fmt: skip

    def _pass(self, forward: Forward, passes: dict[int, list[float]]) -> None:
        """Count a forward if each of its rows computes `width` positions, or one token."""
        own = forward.scheduled_requests
        if self._width is None:
            rows, keys = own.num_decode_requests, own.sum_decode_kv_tokens
            counts = not own.num_prefill_requests
        else:
            rows, keys = own.num_prefill_requests, own.sum_prefill_kv_tokens + own.sum_prefill_tokens
            counts = own.sum_prefill_tokens == rows * self._width
        if rows and counts and forward.wall_time > 0:
            for i, value in enumerate((1.0, forward.wall_time, float(keys))):
                passes[rows][i] += value

    def _event(self, index: int, event: Any, blocks: dict[str, float]) -> None:
        held, known = self._held[index], self._known[index]
        if isinstance(event, AllBlocksCleared):
            blocks["cleared"] += sum(map(len, held.values()))
            held.clear()
        elif isinstance(event, BlockRemoved):
            blocks["removed"] += len(event.block_hashes)
            for name in event.block_hashes:
                copies = held.get(name, set())
                copies.discard((event.medium or GPU, event.group_idx))
                if not copies:
                    held.pop(name, None)
        else:
            blocks["stored"] += len(event.block_hashes)
            for name in event.block_hashes:
                if name not in held:  # tokens count once, however many copies hold them
                    blocks["again"] += name in known
                    blocks["tokens"] += event.block_size
                known[name] = None
                held.setdefault(name, set()).add((event.medium or GPU, event.group_idx))
            while len(known) > REMEMBERED:
                del known[next(iter(known))]

    def close(self) -> None:
        """Close the sockets."""
        for stream in (*self._forwards, *self._events):
            stream.close()
