"""What the diffusion runs add to a Poisson trace: `python trace.py IN OUT [--steps LEAST,MOST] [--shared N]`.

Each request draws its own `diffusion_max_steps`, and with --shared N it begins with one of four prompts of N tokens.
"""

import argparse
import json
import random
from pathlib import Path

PROMPTS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", help="LEAST,MOST; none: the sampler decides")
    parser.add_argument("--shared", type=int, default=0, help="tokens")
    args = parser.parse_args()
    draw, lines = random.Random(args.source.name), [json.loads(line) for line in args.source.read_text().splitlines()]
    for line in lines:
        if args.steps:
            line["diffusion_max_steps"] = draw.randint(*map(int, args.steps.split(",")))
        if args.shared:
            blocks, prompt = args.shared // line["block_size"], draw.randrange(PROMPTS)
            line["hash_ids"] = [f"shared-{prompt}-{i}" for i in range(blocks)] + line["hash_ids"]
            line["input_length"] += blocks * line["block_size"]
    args.out.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
