"""dsim model: the model in a directory, whether and how it runs, and its memory."""

from typing import Annotated

import typer

from . import options
from .help import Command, Group
from .options import option
from .screen import print_json

app = typer.Typer(no_args_is_help=True, cls=Group)


@app.callback()
def models() -> None:
    """Describe a model's directory and what it needs.

    dsim model info tiny
    dsim model info ./LLaDA-8B-Instruct --gpu H100
    """


@app.command("info", cls=Command)
def info(
    model: Annotated[str, typer.Argument(metavar="DIR", help="A model's directory, or a preset: tiny, sdar-8b ...")],
    gpu: Annotated[
        str | None, option("NAME", "A GPU, which need not be in this machine: H100, A100-80GB ...", "--gpu")
    ] = None,
    mask_token_id: options.MaskTokenId = None,
    block_length: options.BlockLength = None,
    as_json: options.AsJson = False,
) -> None:
    """Describe a model, whether and how it runs here, and what it needs.

    None of its code is run. No weights are read, except a tied head, to check that it equals the embedding.

    dsim model info tiny
    dsim model info ./LLaDA-8B-Instruct --gpu H100
    """
    from ..device.model_info import describe

    found = describe(model, gpu, mask_token_id, block_length)
    if as_json:
        print_json(found, indent=2)
        return
    width = max(map(len, found["lines"]))
    for name, text in found["lines"].items():
        typer.echo(f"{name:<{width}}  {text}")
