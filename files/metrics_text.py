"""The samples of a server's page of metrics (Prometheus text)."""

import re
from collections import defaultdict

from ..engine.errors import DsimError
from .read import FilePath, cut, parsing, read_text

# Of one engine's ranks but the first, which speaks for all.
RANK = re.compile(r'^.*[{,](?:tp|pp|moe_ep)_rank="[^0].*\n', re.MULTILINE)
Page = dict[str, list[tuple[dict[str, str], float]]]  # by name, each sample's labels and value


def page_of(text: str, source: object) -> Page:
    """The samples of a page; DsimError names the source."""
    from prometheus_client.parser import text_string_to_metric_families  # only servers' pages need it

    page: Page = defaultdict(list)
    with parsing(source, "Prometheus metrics"):
        for family in text_string_to_metric_families(RANK.sub("", text)):
            for sample in family.samples:
                page[sample.name].append((sample.labels, float(sample.value)))
    return page


def read_samples(path: FilePath) -> dict[str, float]:
    """One model's samples summed over labels; DsimError names the file."""
    page = page_of(read_text(path), path)
    models = {labels["model_name"] for rows in page.values() for labels, _ in rows if "model_name" in labels}
    if len(models) > 1:
        raise DsimError(
            f"{path}: holds the metrics of {len(models)} models ({cut(', '.join(sorted(models)))}), expected one"
        )
    if not any(":" in name for name in page):
        raise DsimError(f"{path}: holds no metrics of an engine, expected vllm:*, sglang:* or lmdeploy:*")
    return {name: sum(value for _, value in rows) for name, rows in page.items()}
