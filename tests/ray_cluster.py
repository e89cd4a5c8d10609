"""A Ray cluster on this machine, for tests of work that is sent to one."""

import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Ray replaces 127.0.0.1 by the machine's own address.
COMMON = {"node_ip_address": "127.0.0.2", "object_store_memory": 80 * 2**20}


class TwoWorkers:
    """A Ray cluster on loopback: a head without CPUs, and two workers of one each."""

    def __init__(self, folder: Path) -> None:
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 0, "include_dashboard": False, "temp_dir": str(folder / "ray"), **COMMON}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.address: str = self.cluster.address
        self.workers: list[Any] = []
        self.fill()

    def fill(self) -> None:
        """Have two workers."""
        while len(self.workers) < 2:
            self.workers.append(self.cluster.add_node(num_cpus=1, **COMMON))

    def kill_a_worker(self) -> None:
        import ray

        own = ray.get_runtime_context().get_node_id()  # the one that this process has joined by
        worker = next(w for w in self.workers if w.node_id != own)
        self.workers.remove(worker)
        self.cluster.remove_node(worker, allow_graceful=False)


@pytest.fixture(scope="module")
def shared_cluster() -> Iterator[TwoWorkers]:
    pytest.importorskip("ray", reason="the extra `cluster` is not installed")
    with pytest.MonkeyPatch.context() as patched, tempfile.TemporaryDirectory(prefix="ray") as folder:
        patched.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patched.setenv("RAY_TMPDIR", folder)  # sockets want a short path
        (Path(folder) / "ray").mkdir()
        before = signal.getsignal(signal.SIGTERM)
        cluster = TwoWorkers(Path(folder))
        signal.signal(signal.SIGTERM, before)  # Ray takes it, and other tests are about it
        try:
            yield cluster
        finally:
            cluster.cluster.shutdown()


@pytest.fixture
def cluster(shared_cluster: TwoWorkers) -> TwoWorkers:
    """The module's cluster, with two workers again where a test has killed one."""
    shared_cluster.fill()
    return shared_cluster
