"""Markdown tables, and a command line that prints those that are named."""

import argparse
from collections.abc import Callable, Iterable, Mapping


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    """Each row as soon as it is known."""
    head = list(head)
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}", flush=True)
    for row in rows:
        print(f"| {' | '.join(row)} |", flush=True)


def print_named(answers: Mapping[str, Callable[[], None]], doc: str) -> None:
    """The tables named on the command line, or all. doc: the benchmark's docstring."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[[], *answers], metavar="NAME", help=", ".join(answers))
    for name in parser.parse_args().names or answers:
        print(f"\n## {name}: {answers[name].__doc__}\n")
        answers[name]()
