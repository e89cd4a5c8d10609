"""dsim serve: an OpenAI-compatible server for a model on a device, or for the twin in real time."""

import os
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..engine.errors import DsimError, MachineError
from . import choices
from . import questions as q
from .answer import Answer
from .cautions import warn_of_yields
from .declared import Question, Watch

if TYPE_CHECKING:
    from ..engine.journal import Append
    from ..report.run_page import RunResult
    from ..results.world import World
    from ..serve.open import Behind


@dataclass(frozen=True)
class ServeQuestion(q.OnDevice, q.Coded, q.Forced, Question["RunResult"]):
    """Serve an OpenAI-compatible API, block by block, until Ctrl-C.

    dsim serve --twin a100-sdar-8b --policy optimus --replicas 2 -o runs/served
    dsim serve --model tiny --policy lmdeploy-bd32

    Model and device:
      --model M: Serve a model here: tiny, sdar-1.7b ... or a Hugging Face directory.
      --tokenizer DIR: With --twin: count prompts with this tokenizer.json instead of by bytes.
      --device D: With --model or --random-weights: cuda or cpu; by default the GPU, if there is one.
      --graphs: With --model or --random-weights: decode steps are captured CUDA graphs; the default on a GPU.
      --eos: With --model or --random-weights: requests end at the checkpoint's EOS.
      --mask-token-id N: With --model or --random-weights: the mask token's id, if the directory does not state it.
      --block-length N: With --model or --random-weights: the block that the weights were trained with.
    Policy and profile:
      --twin PROFILE: Serve the twin of this profile in real time instead.
      --profile P: With --model or --random-weights: its profile, for --commits twin and elastic chunks.
      --commits C: With --model or --random-weights: what decides which tokens commit, model or twin.
    Fleet and price:
      --replicas N: Replicas behind the router.
      --speed X: With --twin: speed of time relative to the clock.
    Logs:
      --metrics-as E: Publish the metrics of vllm, sglang or lmdeploy, for any --policy.
      --access-log FILE: Write a JSON line per request, as a trace for `replay`.
    Server:
      --host H: The address to listen on.
      --port N: The port; 0 takes a free one.
      --served-name NAME: The model's name in the API.
      --api-key KEY: Require this key from clients of /v1; by default that of the variable DSIM_API_KEY.
    Output:
      -o, --out DIR: Write the journal and report.html at the end.
    """

    COMMON = "model twin policy profile replicas router commits device host port api_key slos emit out"

    _: KW_ONLY
    model: str | None = None
    twin: str | None = None
    policy: str = choices.POLICY
    replicas: int = 1
    router: str = "round-robin"
    speed: float = 1.0
    metrics_as: str | None = None
    workload: str | None = None
    profile: str | None = None
    commits: str | None = None
    eos: bool = False
    emit: str = "block"
    access_log: str | Path | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    served_name: str | None = None
    api_key: str | None = None
    slos: Sequence[str] = ()
    seed: int = 0

    def answer(self, watch: Watch) -> "Answer[RunResult]":
        model = self.model or self.random_weights
        if (model is None) == (self.twin is None):
            raise DsimError(f"--model is {model} and --twin is {self.twin}, expected one of them")
        from ..results.run_info import FILES
        from ..results.world import World, named_code
        from ..serve.server import ServerOptions, serve_until_stopped

        api_key = self.api_key or os.environ.get("DSIM_API_KEY")
        options = self.values("host", "port", "served_name", "access_log")
        world = World(
            trace="",
            profile=self.twin or choices.PROFILE,
            allow_code=named_code([self.policy, self.router], self.allow_code),
            **self.values("policy", "workload", "replicas", "router", "emit", "seed", "eos"),
        )
        served = serve_until_stopped(
            lambda append: self._open(world, append, watch),
            ServerOptions(api_key=api_key, **options),
            self.slos,
            policy=self.policy,
            out=self.folder,
            force=self.force,
            say=watch.say,
        )
        failure = q.optional(lambda error: MachineError(str(error)), served.failure)
        code = int(not served.started)  # uvicorn's log says why
        return Answer(value=served.run, out=self.folder, files=FILES, failure=failure, code=code)

    def _open(self, world: "World", append: "Append | None", watch: Watch) -> "Behind":
        from ..serve.open import open_live, open_twin

        if self.twin is not None:
            _ = world.fleet()  # refused before a line is printed
            watch.say(f"Loading the twin of {self.twin}, {self.policy}")
            behind = open_twin(world, append=append, **self.values("speed", "tokenizer", "metrics_as"))
            warn_of_yields(watch, world)
            return behind
        from ..profiler.profile import load

        profile = q.optional(load, self.profile)
        loaded = self.loaded(self.model, self.seed)
        return open_live(loaded, world, profile=profile, append=append, **self.values("commits", "metrics_as"))
