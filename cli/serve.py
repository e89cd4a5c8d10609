"""dsim serve: an OpenAI-compatible server for a model on a device, or for the twin in real time."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar
from typing import Annotated as A

from ..engine.errors import DsimError, MachineError
from . import choices
from . import questions as q
from .answer import Answer
from .cautions import warn_of_yields
from .declared import Opt, Question, Watch

if TYPE_CHECKING:
    from ..engine.journal import Append
    from ..report.run import RunResult
    from ..results.world import World
    from ..serve.open import Behind

OF_A_MODEL = ("profile", "commits", "device", "graphs", "eos", "mask_token_id", "block_length")


@dataclass(frozen=True)
class ServeQuestion(q.OnDevice, q.Coded, q.Forced, Question["RunResult"]):
    """Serve an OpenAI-compatible API, block by block, until Ctrl-C.

    dsim serve --twin a100-sdar-8b --policy optimus --replicas 2 -o runs/served
    dsim serve --model tiny --policy lmdeploy-bd32
    """

    COMMON: ClassVar = (
        "model", "twin", "policy", "profile", "replicas", "router", "commits", "device", "host", "port", "api_key",
        "slos", "emit", "out",
    )  # fmt: skip

    _: KW_ONLY
    model: A[
        str | None, Opt("Serve a model here: tiny, sdar-1.7b ... or a Hugging Face directory.", "M", "Model and device")
    ] = None
    twin: A[
        str | None, Opt("Serve the twin of this profile in real time instead.", "PROFILE", "Policy and profile")
    ] = None
    policy: A[str, q.ONE_POLICY] = choices.POLICY
    replicas: A[int, Opt("Replicas behind the router.", "N", "Fleet and price")] = 1
    router: A[str, q.ROUTER] = "round-robin"
    speed: A[
        float, Opt("With --twin: speed of time relative to the clock.", "X", "Fleet and price", needs=("twin",))
    ] = 1.0
    metrics_as: A[
        str | None, Opt("Publish the metrics of vllm, sglang or lmdeploy, for any --policy.", "E", "Logs")
    ] = None
    workload: A[str | None, q.WORKLOAD] = None
    profile: A[
        str | None, Opt("With --model: its profile, for --commits twin and elastic chunks.", "P", "Policy and profile")
    ] = None
    commits: A[
        str | None, Opt("With --model: what decides which tokens commit, model or twin.", "C", "Policy and profile")
    ] = None
    eos: A[bool, q.ENDS_AT_EOS] = False
    tokenizer: A[
        str | None,
        Opt(
            "With --twin: count prompts with this tokenizer.json instead of by bytes.", "DIR", "Model and device",
            needs=("twin",),
        ),
    ] = None  # fmt: skip
    emit: A[str, q.EMIT] = "block"
    access_log: A[str | Path | None, Opt("Write a JSON line per request, as a trace for `replay`.", "FILE", "Logs")] = (
        None
    )
    host: A[str, Opt("The address to listen on.", "H", "Server")] = "127.0.0.1"
    port: A[int, Opt("The port; 0 takes a free one.", "N", "Server")] = 8000
    allow_host: A[
        Sequence[str],
        Opt("On 127.0.0.1: a further host name of this server, in addition to localhost.", "NAME", "Server"),
    ] = ()
    served_name: A[str | None, Opt("The model's name in the API.", "NAME", "Server")] = None
    api_key: A[str | None, Opt("Require this key from clients of /v1.", "KEY", "Server", envvar="DSIM_API_KEY")] = None
    grace: A[float, Opt("How long requests in flight may take to end after Ctrl-C.", "S", "Server")] = 60.0
    slos: A[Sequence[str], q.SLO] = ()
    seed: A[int, q.SEED] = 0
    out: A[str | Path | None, q.out("Write the journal and report.html at the end.")] = None

    def answer(self, watch: Watch) -> "Answer[RunResult]":
        model = self.model or self.random_weights
        if (model is None) == (self.twin is None):
            raise DsimError(f"--model is {model} and --twin is {self.twin}, expected one of them")
        for name in OF_A_MODEL:
            if self.twin is not None and self.sets(name):
                option = f"--{name.replace('_', '-')} is {getattr(self, name)}"
                raise DsimError(f"{option} and --twin is {self.twin}, expected --model with it")
        from ..results.run_info import FILES
        from ..results.world import World, named_code
        from ..serve.serving import ServerOptions, serve_until_stopped

        server = ServerOptions(
            self.host, self.port, self.grace, self.allow_host, self.served_name, self.api_key, self.access_log
        )
        world = World(
            trace="", policy=self.policy, profile=self.twin or choices.PROFILE, workload=self.workload,
            replicas=self.replicas, router=self.router, emit=self.emit, seed=self.seed, eos=self.eos,
            allow_code=named_code([self.policy, self.router], self.allow_code),
        )  # fmt: skip
        served = serve_until_stopped(
            lambda append: self._open(world, append, watch), server, self.slos, self.policy, self.folder, self.force,
            watch.say,
        )  # fmt: skip
        return Answer(
            value=served.run, out=self.folder, files=FILES,
            failure=None if served.failure is None else MachineError(str(served.failure)),
            code=int(not served.started),  # uvicorn's log says why
        )  # fmt: skip

    def _open(self, world: "World", append: "Append | None", watch: Watch) -> "Behind":
        from ..serve.open import open_live, open_twin

        if self.twin is not None:
            _ = world.fleet()  # refused before a line is printed
            watch.say(f"Loading the twin of {self.twin}, {self.policy}")
            behind = open_twin(
                world, speed=self.speed, tokenizer=self.tokenizer, append=append, metrics_as=self.metrics_as
            )
            warn_of_yields(watch, world)
            return behind
        from ..live.config import named  # loads PyTorch
        from ..profiler.measure import open_any
        from ..profiler.profile import load

        profile = None if self.profile is None else load(self.profile)
        name, settings = named(self.model, self.random_weights, self.mask_token_id, self.block_length)
        loaded = open_any(name, self.device, self.seed, self.graphs, settings)
        return open_live(
            loaded, world, profile=profile, commits=self.commits, append=append, metrics_as=self.metrics_as
        )
