"""Hashes of a few recorded runs, by name: `NUMBA_DISABLE_JIT=1 python -m dsim.tests.engine.plain NAME ...`"""

import json
import sys

from dsim.engine.jit import JIT

from . import golden


def main(names: list[str]) -> None:
    """Print the hash of each of these cells."""
    assert not JIT, "rules are compiled: NUMBA_DISABLE_JIT=1 is expected"
    found = {}
    for wanted in names:
        cells = {name: (full, how) for name, full, how in golden.worlds(wanted.split(" ")[0].split(",num_pages")[0])}
        full, how = cells[wanted]
        found[wanted] = golden.digest(*golden.run(full, how))
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
