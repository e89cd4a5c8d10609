"""Describe a client's run."""

from ...report.table import number
from ...results.run_info import ClientInfo


def client_lines(client: ClientInfo) -> list[str]:
    """Lateness, failures, and figures that differ from dsim's."""
    lines = [f"Client: {client.tool}, {client.failed:,} requests failed"]
    lines += [f"  {count:,} x {error}" for error, count in client.errors.items()]
    if (late := client.lateness_ms) is not None:
        lines.append(
            f"Lateness: requests were sent {number(late.p50)} ms after their time at the median, "
            f"{number(late.p99)} ms at p99, {number(late.max)} ms at most; latencies run from the sending"
        )
    for name, figure in client.differing.items():
        lines.append(
            f"Own figure: mean {name} is {number(figure.client_ms)} ms by the client's definition or count, "
            f"{number(figure.dsim_ms)} ms by dsim's"
        )
    return lines
