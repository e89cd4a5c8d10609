"""Two processes that share a model say what one says, and send what the twin charges for."""

from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dsim.engine.engine import Engine, Limits
from dsim.engine.errors import ModelError
from dsim.engine.journal import RequestTable
from dsim.engine.policy import parse
from dsim.engine.replay import replay
from dsim.engine.request import Request
from dsim.live import parallel, session
from dsim.live.cache import PagedCache
from dsim.live.config_file import AS_IT_SAYS, Given
from dsim.live.graphs import recompute
from dsim.live.prompts import random_prompts
from dsim.live.sampling import Sampling
from dsim.live.session import Kept
from dsim.live.shares import Share
from dsim.live.stored import Held
from dsim.live.weights import config_of, load
from dsim.profiler import roofline
from dsim.profiler.hardware import gpu
from dsim.profiler.measure import shape_of

from ..worlds import Collector
from . import checkpoints
from .dense import SMALL
from .test_graphs import batch as decode_batch

LENGTHS = [(1, 9), (5, 3), (8, 16), (13, 1), (40, 12), (3, 20)]
TIMES = ("start", "latency", "device")
SIZE = 2


class Shared:
    """A checkpoint, a dense layer and two of experts, what it says by the book, and two processes that share it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.logits = checkpoints.llada2(folder)
        self.model = parallel.join(str(folder), "cpu", torch.float32, 0, AS_IT_SAYS, SIZE, threads=1)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    found = Shared(tmp_path_factory.mktemp("tp"))
    yield found
    found.model.ranks.close()


def run(
    model: Any, spec: str, sampling: Sampling | None = None, graphs: Kept | None = None
) -> tuple[Collector, RequestTable, Limits]:
    limits, journal = Limits(200, 64, 4), Collector()
    requests = [Request(i, 0.0, p, o) for i, (p, o) in enumerate(LENGTHS)]
    prompts = random_prompts(model.config, 7)
    serving = session.Serving(model, parse(spec), limits, prompts, sampling=sampling, graphs=graphs)
    done = session.run(serving, requests, append=journal)
    assert done.failure is None, done.failure
    return journal, done.table, limits


def test_two_processes_say_what_the_model_says_by_the_book(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[torch.Tensor] = []
    confidence = parallel.confidence
    monkeypatch.setattr(
        parallel, "confidence", lambda logits, temperature: said.append(logits) or confidence(logits, temperature)
    )
    model, policy = shared.model, parse("lmdeploy-bd32,block_length=4,page_size=8")
    requests = [Request(0, 0.0, 20, 4)]
    prompts = random_prompts(model.config, 7)
    done = session.run(session.Serving(model, policy, Limits(20, 64, 1), prompts), requests)
    assert done.failure is None, done.failure
    n = torch.arange(20)
    expected = shared.logits(torch.from_numpy(prompts(0, 20)).long(), n[None] // 4 <= n[:, None] // 4)
    torch.testing.assert_close(said[0], expected[-4:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("spec", "sampling", "graphs"),
    [
        ("lmdeploy-bd32,block_length=4", None, False),
        ("lmdeploy-bd32,block_length=4", None, True),
        ("lmdeploy-bd32,block_length=4", Sampling(2.0, top_p=0.9), False),
        ("chunk:3,block_length=4,head=masks", None, True),
        ("chunk:3,block_length=4", Sampling(1.0, gumbel=True), False),
        ("ar", Sampling(2.0, top_p=0.9), False),
        ("ar", None, True),
    ],
)
def test_two_processes_serve_as_one_does_and_the_journal_replays(
    shared: Shared, spec: str, sampling: Sampling | None, graphs: bool
) -> None:
    """With graphs: what would be captured is computed anew, as two processes would capture and replay it."""
    spec += ",max_batch=4,page_size=8,max_prefill_tokens=24"
    ours, table, limits = run(shared.model, spec, sampling, Kept() if graphs else None)
    alone, *_ = run(load(str(shared.folder), "cpu", torch.float32), spec, sampling)
    for name in ours.steps:
        if name not in TIMES:
            assert np.array_equal(ours.steps[name], alone.steps[name]), name
    for name in ours.lists:
        assert np.array_equal(ours.lists[name][0], alone.lists[name][0]), name
    fresh = Engine(parse(spec), limits, RequestTable(len(LENGTHS)))
    assert list(replay(fresh, 0, table.columns, ours.steps, ours.lists)) == []


def test_what_is_sent_is_what_the_twin_charges_for(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session.Serving, "warm_up", lambda *_: None)  # it is not in the journal
    model, traffic, config = shared.model, shared.model.ranks.traffic, shared.model.config
    before = replace(traffic)
    journal, *_ = run(model, "lmdeploy-bd32,block_length=4,max_batch=4,page_size=8")
    steps = journal.steps
    tokens, rows, forwards = (int(steps[name].sum()) for name in ("tokens", "head_rows", "num_forwards"))
    device, shape = gpu("H100"), replace(shape_of(config), vocab=config.vocab + config.vocab % SIZE)
    link = device.link * roofline.LINK_EFFICIENCY
    fixed, per_token = roofline.all_reduce(device, shape, SIZE)
    # Sums a forward, each as late as a link is.
    assert (traffic.reduces - before.reduces) / forwards == 2 * config.layers
    assert fixed == pytest.approx(2 * config.layers * device.link_latency)
    # A ring sends 2 (n - 1) / n times what is summed; the twin's numbers are of two bytes, ours of four.
    reduced = (traffic.reduced - before.reduced) / 4 * roofline.BYTES * 2 * (SIZE - 1) / SIZE
    assert reduced / tokens == pytest.approx(per_token * link, rel=1e-12)
    gathered = (traffic.gathered - before.gathered) / 4 * roofline.BYTES
    one, two = (roofline.latency_model(device, shape, n, graphs=True)[0].head for n in (1, SIZE))
    assert gathered / rows == pytest.approx((two - one / SIZE) * link, rel=1e-3)


def test_heads_that_are_fewer_than_processes_are_held_twice() -> None:
    assert (SMALL.kv_heads, Share(SMALL, 0, 4).config.kv_heads) == (2, 1)


@pytest.mark.parametrize(
    ("name", "size"),
    [("LLaDA2MoeModelLM", 2), ("LLaDA2MoeModelLM", 4), ("DreamModel", 2), ("DreamModel", 4), ("LLaDAModelLM", 2)],
)
def test_a_process_reads_its_share_of_each_tensor_and_no_more(
    tmp_path: Path, name: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One matrix of queries, keys and values, or three with biases; as many KV heads as processes, and fewer."""
    pytest.importorskip("transformers")
    checkpoints.CHECKPOINTS[name](tmp_path)
    whole = load(str(tmp_path), "cpu", torch.float32)
    weights, config = dict(whole.named_parameters()), whole.config
    q, kv, head_dim = config.heads, config.kv_heads, config.head_dim
    num_read: list[int] = []
    read = Held.read

    def counted(held: Held, *parts: Any, **named: Any) -> torch.Tensor:
        tensor = read(held, *parts, **named)
        num_read.append(tensor.numel())
        return tensor

    monkeypatch.setattr(Held, "read", counted)
    for rank in range(size):
        num_read.clear()
        share = dict(load(str(tmp_path), "cpu", torch.float32, rank=rank, size=size).named_parameters())
        assert sum(num_read) == sum(weight.numel() for weight in share.values())
        queries = torch.arange(q)[rank * q // size : (rank + 1) * q // size]
        keys = torch.arange(kv)[rank * kv // size : max(rank * kv // size + 1, (rank + 1) * kv // size)]
        heads = torch.cat([queries, q + keys, q + kv + keys])
        for ours, weight in share.items():
            full, kind = weights[ours], ours.split(".")[-2:]
            if ".qkv." in ours:
                full = full.view(q + 2 * kv, head_dim, *full.shape[1:])[heads].flatten(0, 1)
            elif "output" in kind:
                full = full.view(len(full), q, head_dim)[:, queries].flatten(1)
            elif any("gate_up" in part for part in kind):
                full = torch.cat([half.chunk(size, -2)[rank] for half in full.chunk(2, -2)], -2)
            elif any("down" in part for part in kind):
                full = full.chunk(size, -1)[rank]
            assert torch.equal(weight, full), ours


def test_shares_of_random_weights_agree_on_what_is_not_cut() -> None:
    given = Given(random_weights=True)
    one, two = (dict(load("tiny", "cpu", torch.float32, 0, given, rank, 3).named_parameters()) for rank in range(2))
    same = {name for name in one if torch.equal(one[name], two[name])}
    cut = {f"layers.{i}.{name}.weight" for i in range(4) for name in ("qkv", "output", "gate_up", "down")}
    assert same == {*one} - cut
    assert one["layers.0.down.weight"].shape == (192, 192)


class Watched:
    """A recorder that captures nothing and notes what was captured and replayed, by number."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __call__(self, compute: Any) -> Any:
        number = sum("captured" in line for line in self.seen)
        replay, answers = recompute(compute)
        self.seen.append(f"captured {number}")
        return lambda: self.seen.append(f"replayed {number}") or replay(), answers


def two_ranks(patch: pytest.MonkeyPatch) -> tuple[list[Any], list[Watched]]:
    """Two of three shares of a model in one process, their sums not taken, and what each records."""
    whole, pipes, watched = config_of("tiny"), Pipe(), [Watched(), Watched()]
    models = []
    for rank, pipe in enumerate(pipes):
        ranks = parallel.Ranks(rank, 3, Share(whole, rank, 3).config, pipes=[pipe])
        given = Given(random_weights=True)
        models.append(parallel.summed(load("tiny", "cpu", torch.float32, 0, given, rank, 3), ranks, whole))
    patch.setattr(parallel.Ranks, "sum", lambda _, x: x)
    patch.setattr(parallel.Ranks, "gather", lambda _, x: torch.cat([x, x, x], 1))
    return models, watched


def test_every_process_captures_and_replays_the_same_graphs_in_the_same_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random batches: some captured before, some met first while serving, some eager, prefills among them."""
    models, watched = two_ranks(monkeypatch)
    config, policy = models[0].ranks.config, parse("chunk:3,block_length=4,page_size=8")

    def follow(forward: Any = None) -> Any:
        while models[1].ranks.pipes[0].poll():
            forward = parallel.answer(models[1], forward, *models[1].ranks.receive())
        return forward

    cache = PagedCache(config, 60, 8, "cpu", torch.float32)
    first = parallel.ParallelGraphForward(models[0], cache, longest=56, record=watched[0])
    other = follow()
    other._record = watched[1]
    first.prepare(policy, 3)
    follow(other)
    chance = np.random.default_rng(3)
    for _ in range(20):
        batch = decode_batch(chance, int(chance.integers(1, 7)))
        batch = replace(batch, prefill=bool(chance.random() < 0.3), whole=bool(chance.random() < 0.3))
        first.bring(batch)
        if chance.random() < 0.2:  # drawn tokens are eager
            batch = replace(batch, keys=np.arange(len(batch.tokens), dtype=np.uint64) + 2**63)
        first.run(batch)
        follow(other)
    assert watched[0].seen == watched[1].seen
    assert {line.split()[0] for line in watched[0].seen} == {"captured", "replayed"}
    assert [*first._graphs] == [*other._graphs]
    assert torch.equal(first._held, other._held)
    parallel.ParallelForward(models[0], cache)  # the others drop their graphs for it
    assert not first.is_open
    assert isinstance(follow(other), parallel.ParallelForward)
    with pytest.raises(AssertionError, match="the other processes hold another forward"):
        first.run(batch)


def test_a_forward_that_the_others_dropped_is_not_kept(shared: Shared) -> None:
    spec, kept = "lmdeploy-bd32,block_length=4,max_batch=4,page_size=8", Kept()
    forwards = []
    for sampling in (None, None, Sampling(2.0), None):
        run(shared.model, spec, sampling, kept)
        forwards.append(kept._forward)
    assert forwards[0] is forwards[1] is forwards[2]
    assert forwards[3] is not forwards[0]


def test_a_batch_arrives_as_it_was_sent() -> None:
    forward = parallel.ParallelGraphForward.__new__(parallel.ParallelGraphForward)
    for keys in (None, np.array([2**64 - 1, 3], np.uint64)):
        sent = replace(decode_batch(np.random.default_rng(1), 3), whole=True, keys=keys)
        found = parallel.decoded(forward._encode(sent))
        for name in sent.__slots__:
            ours, theirs = getattr(found, name), getattr(sent, name)
            assert np.array_equal(ours, theirs), name
            assert getattr(ours, "dtype", None) == getattr(theirs, "dtype", None), name


def test_a_process_that_ends_while_the_device_waits_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    aborted: list[bool] = []
    monkeypatch.setattr(parallel, "_abort", lambda: aborted.append(True))
    ours, theirs = Pipe()
    ranks = parallel.Ranks(0, 2, config_of("tiny"), pipes=[ours])
    ranks.processes = [SimpleNamespace(join=lambda seconds: None, exitcode=None)]
    looks = iter([False] * 3000 + [True])
    ranks.wait(lambda: next(looks))
    ranks.processes[0].exitcode = -9
    with pytest.raises(ModelError, match="process 1 of --tp 2 has ended: exit code -9"):
        ranks.wait(lambda: False)
    other = parallel.Ranks(1, 2, config_of("tiny"), pipes=[theirs], parent=-1)  # rank 0 is gone
    with pytest.raises(EOFError):
        other.wait(lambda: False)
    assert aborted == [True, True]


def test_who_waits_asks_nothing_of_the_process_group_whose_operations_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("tiny")
    ours, theirs = Pipe()
    first, other = (parallel.Ranks(i, 2, config, pipes=[pipe]) for i, pipe in enumerate((ours, theirs)))
    for name in ("all_reduce", "all_gather"):
        monkeypatch.delattr(parallel.dist, name)
    first.send_message(parallel.OPEN, (7, 8, 9))
    first.send_message(parallel.STOP)
    for what, numbers in ((parallel.OPEN, [7, 8, 9]), (parallel.STOP, [])):
        found = other.receive()
        assert (found[0], found[1].tolist()) == (what, numbers)
    theirs.send_bytes(b"CUDA out of memory")  # its last words
    first.processes = [SimpleNamespace(join=lambda seconds: None, exitcode=0)]
    with pytest.raises(ModelError, match="process 1 of --tp 2 has ended: CUDA out of memory"):
        first.check_others()
    ours.close()
    with pytest.raises(EOFError):  # rank 0 is gone, and so they go
        other.receive()


def test_a_process_that_dies_is_said_in_a_line(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of the tests that share them."""
    model, ranks = shared.model, shared.model.ranks
    policy = parse("lmdeploy-bd32,block_length=4,page_size=8")
    serving = session.Serving(model, policy, Limits(20, 64, 1), random_prompts(model.config, 7))
    requests = [Request(0, 0.0, 20, 4)]

    def die(*_: object) -> None:
        ranks.processes[0].kill()
        ranks.sum(torch.ones(2))

    with monkeypatch.context() as patch:
        patch.setattr(parallel.ParallelForward, "_hidden", die)
        done = session.run(serving, requests)
    said = "process 1 of --tp 2 has ended: exit code -9"
    assert isinstance(done.failure, ModelError)
    assert str(done.failure) == said
    with pytest.raises(ModelError, match=said):  # and so between two batches
        session.run(serving, requests)


class Meeting:
    """Several GPUs and NCCL as a process would find them, faked: what was asked of them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[str, Any]] = []
        patch.setattr(torch.cuda, "set_device", lambda index: self.asked.append(("set_device", index)))
        for name, fake in (
            ("init_process_group", lambda kind, **how: self.asked.append((kind, (how["rank"], how["world_size"])))),
        ):
            patch.setattr(parallel.dist, name, fake)
        patch.setattr(parallel.weights, "load", lambda name, *how: self._load(load, name, *how))

    def _load(self, load: Any, name: str, device: str, *how: Any) -> Any:
        """What goes to a GPU stays on the CPU."""
        self.asked.append((name, device))
        return load(name, "cpu", *how)


@pytest.mark.parametrize("rank", [0, 2])
def test_on_gpus_each_process_takes_its_own_and_they_meet_by_nccl(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = parallel.Ranks(rank, 3, Share(config_of("tiny"), rank, 3).config)
    with monkeypatch.context() as patch:
        meeting = Meeting(patch)
        source = parallel.Source("tiny", "cuda", torch.float32, 0, AS_IT_SAYS, 3, 1, "where")
        model = parallel._enter(ranks, source)
        own = f"cuda:{rank}"
        assert meeting.asked == [("set_device", rank), ("nccl", (rank, 3)), ("tiny", own)]
    layer: Any = model.layers[0]
    assert (layer.split, layer.down.share.weight.shape) == ((1, 1, 1), (192, 192))


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ModelError, match="--tp is 3, and there are 2 CUDA devices: expected one each"):
        parallel.join("tiny", "cuda", torch.bfloat16, 0, AS_IT_SAYS, 3)
