"""Published experiments next to the twin's predictions: `python -m dsim.research.reproduce`."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import typer

from ...cli import questions as q
from ...cli.answer import Answer
from ...cli.declared import Question, Watch, command
from ...cli.screen import run
from ...engine.errors import DsimError
from .points import Reproduced


@dataclass(frozen=True, kw_only=True)
class ReproduceQuestion(q.Somewhere, q.Coded, q.Forced, Question[Reproduced | None]):
    """Run published experiments in the twin, and list published values next to predictions, with a status each.

    python -m dsim.research.reproduce focus-throughput -o runs/focus
    python -m dsim.research.reproduce --list

    Arguments:
      experiments [NAME]...: Shipped experiments or TOML files; all shipped ones by default.
    What to do:
      --list: List the shipped experiments and run none.
      --published FILE: A CSV with published values to fill in, in the form of results.csv.
      --seeds N: Runs of each point, instead of the experiment's own number.
    Output:
      -o, --out DIR: Folder of runs, results.csv and report.html; a second call continues.
    """

    experiments: Sequence[str] = ()
    list: bool = False
    published: Path | None = None
    seeds: int | None = None
    jobs: int | None = None
    out: Path | None = None

    def answer(self, watch: Watch) -> Answer[Reproduced | None]:
        from ...engine.allowed_code import allowed
        from ...report.html import to_html
        from ...results.world import different
        from .experiment import MAX_SEEDS, read, shipped
        from .points import FILES, check_published, read_published, reproduce
        from .reproduce_page import reproduce_page

        if self.list:
            every = {name: read(name) for name in shipped()}
            width = max(map(len, every))
            listed = [
                {"name": n, "title": e.title, "system": e.system, "citation": e.citation} for n, e in every.items()
            ]
            return Answer(value=None, json=listed, lines=[f"{name:<{width}}  {e.title}" for name, e in every.items()])
        if self.seeds is not None and not 1 <= self.seeds <= MAX_SEEDS:
            raise DsimError(f"--seeds is {self.seeds}, expected 1 to {MAX_SEEDS}")
        code = allowed(self.allow_code)
        experiments = [
            read(name, code) for name in different(list_of(self.experiments) or list_of(shipped()), "experiment")
        ]
        published = {} if self.published is None else read_published(self.published)
        check_published(experiments, published, str(self.published))
        with watch.bar("reproduce", "runs", note="starting") as bar:
            done = reproduce(
                experiments, self.out, published=published, seeds=self.seeds, jobs=self.jobs, ray=self.ray,
                force=self.force, page=lambda rows: to_html(reproduce_page(rows.to_json(), watch.command())),
                progress=lambda done, total, name: bar.update(done, total, note=name),
            )  # fmt: skip
        data = done.to_json()
        interrupted = f"Interrupted: {done.num_run + done.num_reused} of {done.num_points} runs are done"
        interrupted += " and kept; to go on, the same command again" if self.out is not None else ""
        return Answer(
            value=done, json=data, page=lambda: reproduce_page(data, watch.command()), out=self.out, files=FILES,
            interrupted=interrupted if done.interrupted else "",
        )  # fmt: skip


list_of = list  # the field has its name

if __name__ == "__main__":
    try:
        typer.run(command(ReproduceQuestion, run))
    except DsimError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(2)
