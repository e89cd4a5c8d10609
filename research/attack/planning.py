"""What planners and servers read: data sheets, shapes, yields, stores, requests."""

import asyncio
import contextlib
import json
import os
from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

from dsim.comparison.comparison import COMPARISON
from dsim.engine.errors import DsimError
from dsim.files.place import FolderKind, check_folder
from dsim.planner.backend import Pool
from dsim.planner.capacity import CAPACITY
from dsim.planner.memo import STORE, Memo
from dsim.planner.plan_result import PLAN
from dsim.planner.sweep import SWEEP
from dsim.planner.tune import TUNE
from dsim.profiler import given_yield, hardware, models, profile
from dsim.profiler.roofline import roofline
from dsim.results.run_folder import RUN

from . import mutate

Attack = Callable[[Random, Path], None]


def of_files() -> dict[str, tuple[Attack, int]]:
    """By name: what reads a file, and how often beside the others."""
    return {
        "data sheet": (data_sheet, 4), "model's shape": (shape, 4), "yield": (yields, 2),
        "store of replays": (store, 4), "manifest": (manifest, 4),
    }  # fmt: skip


def write(path: Path, data: bytes | str) -> Path:
    """The file, written."""
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


# ---- hardware, models and yields ------------------------------------------------------------------------------

SHEET = """name = "Mine"
source = "its data sheet, page 2"
bf16_tflops = 500
bandwidth_gb_s = 4000
memory_gb = 96
link_gb_s = 450
link_latency_us = 10
matmul_efficiency = 0.65
bandwidth_efficiency = 0.8
"""
DENSE = {
    "architectures": ["SDARForCausalLM"], "_name_or_path": "owner/SDAR-mine", "num_hidden_layers": 4,
    "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 1024,
    "vocab_size": 32000, "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip
SPARSE = DENSE | {
    "architectures": ["LLaDA2MoeModelLM"], "num_experts": 16, "num_experts_per_tok": 2, "num_shared_experts": 1,
    "moe_intermediate_size": 128, "first_k_dense_replace": 1,
}  # fmt: skip
OLDER = {
    "model_type": "llada", "n_layers": 4, "d_model": 512, "n_heads": 8, "mlp_hidden_size": 1024,
    "embedding_size": 32000, "max_sequence_length": 4096,
}  # fmt: skip


@cache
def _commits() -> Any:
    return profile.load(profile.DEFAULT).commits


def _priced(gpu: hardware.Gpu, model: models.ModelShape, kind: str, chance: Random, folder: Path) -> None:
    """Make the profile of a model on a GPU, write it and read it."""
    made = roofline(gpu, model, chance.choice((1, 2)), generates=kind, yields=_commits())
    profile.save(made, folder / "p.json", force=True)
    assert profile.load(folder / "p.json") == made


def data_sheet(chance: Random, folder: Path) -> None:
    """A GPU's TOML, and a known model on it."""
    path = write(folder / "gpu.toml", mutate.toml_text(SHEET, chance))
    gpu = hardware.gpu(str(path))
    model = models.model("SDAR-8B")
    try:
        _priced(gpu, model, models.family(model), chance, folder)
    except DsimError as error:  # the model does not fit: no file is to blame
        raise DsimError(f"{path}: {error}") from None


def shape(chance: Random, folder: Path) -> None:
    """A Hugging Face config.json, and its model on a known GPU."""
    path = write(folder / "config.json", mutate.json_text(chance.choice((DENSE, SPARSE, OLDER)), chance))
    found = models.model(str(path if chance.random() < 0.5 else folder))
    kind = models.family(found, models.architecture_of(str(path)))
    try:
        _priced(hardware.gpu("h200"), found, kind, chance, folder)
    except DsimError as error:
        raise DsimError(f"{path}: {error}") from None


YIELDS = [["0.9", "3.2", "32"], ["0.8", "4.5", "32"]]


def yields(chance: Random, folder: Path) -> None:
    """A `--yield`: words, or a table by threshold. Now and then it is calibrated, too, which takes a second or two."""
    head = ["threshold", "yield", "block_length"]
    path = write(folder / "y.csv", mutate.table(head, YIELDS, chance))
    text = mutate.spec(chance.choice(("3.2", "per-forward:2.5", "y.log")), chance)
    if chance.random() < 0.5:
        text = str(path)
    with contextlib.ExitStack() as stack:
        if chance.randrange(500) != 217:  # never what a shrinking search likes
            stack.enter_context(mock.patch.object(given_yield, "_model", return_value=_commits()[0]))
        try:
            given_yield.given_yield(text, 32, 0.9)
        except DsimError as error:
            if text == str(path):
                raise
            raise DsimError(f"{path}: {error}") from None


# ---- plans ---------------------------------------------------------------------------------------------------


def _answers() -> dict[str, Any]:
    return {f"replay {i}": {"rate": float(i), "values": [0.1, None, "x" * i], "stable": True} for i in range(9)}


def _ask(memo: Memo) -> list[Any]:
    return list(memo.map(Pool(1), lambda key: _answers()[key], list(_answers()), lambda key: {"of": key}))


@cache
def _store() -> bytes:
    """A store of a few replays."""
    with TemporaryDirectory() as folder:
        memo = Memo()
        memo.open(Path(folder) / STORE)
        _ask(memo)
        memo.claim("plan", {"seed": 0})
        memo.close()
        return (Path(folder) / STORE).read_bytes()


def store(chance: Random, folder: Path) -> None:
    """The store of a command's replays: what it answers is what was put there."""
    memo = Memo()
    write(folder / STORE, mutate.damaged(_store(), chance))
    try:
        memo.open(folder / STORE)
        memo.claim("plan", {"seed": 0})
        assert _ask(memo) == list(_answers().values())
    finally:
        memo.close()


MANIFESTS: tuple[tuple[FolderKind, dict[str, Any]], ...] = (
    (RUN, {"schema": "dsim-run", "version": 1}), (SWEEP, {"schema": "dsim-sweep", "version": 1}),
    (CAPACITY, {"rate": 1, "replicas": 1, "binding_slo": "x", "curve": []}),
    (COMPARISON, {"definitions": {}, "pairs": [], "cells": [], "overall": {}}),
    (TUNE, {"schema": "dsim-tune"}), (PLAN, {"schema": "dsim-plan"}),
)  # fmt: skip


def manifest(chance: Random, folder: Path) -> None:
    """An output folder whose manifest says this or that: nothing in it is touched by the look at it."""
    kind, info = chance.choice(MANIFESTS)
    out = folder / "out"
    out.mkdir()
    write(out / kind.manifest, mutate.json_text(info, chance))
    if kind.store is not None and chance.random() < 0.5:
        write(out / kind.store, mutate.damaged(_store(), chance))
    if chance.random() < 0.2:
        write(out / chance.choice(("thesis.tex", ".hidden", "report.html", "replays.db")), b"x")
    was = sorted((p.name, p.read_bytes()) for p in out.iterdir())
    try:
        check_folder(out, kind, force=True)
    finally:
        assert sorted((p.name, p.read_bytes()) for p in out.iterdir()) == was


# ---- what clients ask of a server -----------------------------------------------------------------------------

ASKED: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [
        {"model": "m", "prompt": "hello", "max_tokens": 4, "stream": True, "n": 1, "echo": False},
        {"prompt": [1, 2, 3], "max_completion_tokens": 4}, {"prompt": ["hello"]},
    ],
    "/v1/chat/completions": [
        {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": False, "max_tokens": 4},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "best_of": 1},
    ],
}  # fmt: skip


class _Busy:
    """A fleet that takes no request: what was understood of one is what is tried here."""

    def __init__(self) -> None:
        from dsim.serve.real_time import Clock

        self.clock = Clock()

    def submit(self, _prompt: list[int], _most: int) -> None:
        from dsim.serve.served import RefusedError

        raise RefusedError(503, "the queue is full")


@cache
def _routes(words: str) -> Any:
    from dsim.serve.app import Settings, application
    from dsim.serve.words import Bytes, Tokenized

    fleet: Any = _Busy()
    return application(fleet, Tokenized(words) if words else Bytes(), Settings("m", "x"))


def asked(words: str, chance: Random, folder: Path) -> None:
    """A request of a client: an answer, whatever it asks."""
    path = chance.choice(list(ASKED))
    data = mutate.json_text(chance.choice(ASKED[path]), chance)
    head = [(b"content-type", b"application/json")]
    if chance.random() < 0.1:
        head.append((chance.choice((b"authorization", b"content-length")), mutate.damaged(b"Bearer x", chance)))
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": path,
        "raw_path": path.encode(), "query_string": b"", "headers": head, "scheme": "http", "root_path": "",
    }  # fmt: skip
    sent: list[dict[str, Any]] = []
    came: list[dict[str, Any]]
    came = [{"type": "http.request", "body": data, "more_body": False}, {"type": "http.disconnect"}]

    async def receive() -> dict[str, Any]:
        return came.pop(0)

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(_routes(words)(scope, receive, send))
    status, body = sent[0]["status"], json.loads(b"".join(m.get("body", b"") for m in sent))
    said = body["error"]["message"]
    assert status in (400, 401, 404, 413, 503), (status, said)
    assert len(said) < 300, said
    if status != 503:
        raise DsimError(said)


def of_clients(work: Path) -> dict[str, Attack]:
    """By name: what reads a client's request, with each kind of words there is."""
    found: dict[str, Attack] = {"request": partial(asked, "")}
    if find_spec("tokenizers"):
        from tokenizers import Tokenizer, pre_tokenizers
        from tokenizers import models as kinds

        made = Tokenizer(kinds.WordLevel({"hello": 7, "?": 0}, unk_token="?"))
        made.pre_tokenizer = pre_tokenizers.Whitespace()
        made.save(str(work / "tokenizer.json"))
        found["request, tokenized"] = partial(asked, os.fspath(work / "tokenizer.json"))
    return found
