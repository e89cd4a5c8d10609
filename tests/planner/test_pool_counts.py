"""Pools of a capacity: the smallest numbers of replicas, against known fleets and one pool of such servers."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from dsim.planner.capacity import capacity, fewest_replicas
from dsim.planner.pool_counts import Counts, fewest_of_each_pool, smallest, with_counts
from dsim.results.world import World

from ..checks import cases, refused
from ..cli.command import dsim, succeed
from ..worlds import second_profile

MOST = 6
QUICK = {"num_requests": 400, "precision": 0.2, "max_replications": 8, "jobs": 1, "curve": False}


@cases("seed", *range(12))
def test_a_fleet_is_found_whatever_the_first_guess_and_the_prices_of_which_no_pool_can_lose_a_replica(
    seed: int,
) -> None:
    draw = random.Random(seed)
    pools = draw.choice([1, 2, 3])
    least = tuple(tuple(draw.randint(1, MOST) for _ in range(pools)) for _ in range(draw.randint(1, 3)))
    prices = [draw.choice([1.0, 2.0, 3.5]) for _ in range(pools)]
    start = tuple(draw.randint(1, MOST) for _ in range(pools))
    errs = draw.random() < 0.5  # short replays then find one replica too few

    def is_enough(counts: Counts) -> bool:
        return any(all(n >= m for n, m in zip(counts, one, strict=True)) for one in least)

    def meets_shortly(counts: Counts) -> bool:
        return is_enough(tuple(n + errs for n in counts))

    counts = smallest(start, prices, MOST, meets_shortly, is_enough)
    assert is_enough(counts)
    for k, num in enumerate(counts):
        assert num == 1 or not is_enough((*counts[:k], num - 1, *counts[k + 1 :]))
    if len(least) == 1:
        assert counts == least[0]
    with refused("6 replicas of each pool are not enough"):
        smallest(start, prices, MOST, lambda counts: False, is_enough)


@pytest.fixture
def queue() -> World:
    """Two pools of servers of constant service of 1 s."""
    server = f"@{second_profile(Path.cwd())},ar,max_batch=1"
    return World(
        "azure-conv", pools=(f"one:1{server}", f"two:1{server}"), arrival="poisson", lengths="fixed:1,1",
        slos=("mean:e2el=3s",),
    )  # fmt: skip


def one_pool(queue: World, replicas: int) -> World:
    _, _, place = queue.pools[0].partition("@")
    profile, _, policy = place.partition(",")
    return replace(queue, pools=(), profile=profile, policy=policy, replicas=replicas)


def test_two_pools_of_the_same_servers_sustain_what_one_pool_of_all_does(queue: World) -> None:
    apart = capacity(with_counts(queue, (1, 2)), **QUICK)
    together = capacity(one_pool(queue, 3), **QUICK)
    assert (apart.rate, apart.replicas) == (together.rate, 3)
    assert [(pool.name, pool.replicas) for pool in apart.pools] == [("one", 1), ("two", 2)]
    assert apart.pools[0].busy == pytest.approx(apart.pools[1].busy, rel=0.05)
    assert together.pools == ()


def test_as_many_servers_are_needed_in_two_pools_as_in_one(queue: World) -> None:
    single = fewest_replicas(one_pool(queue, 1), 3.2, **QUICK)
    found = fewest_of_each_pool(queue, 3.2, **QUICK)
    assert found.replicas == single.replicas
    assert found.rate.low >= 3.2
    assert found.target == 3.2


@pytest.mark.slow
def test_the_command_takes_a_fleets_file_and_names_its_pools() -> None:
    server = "h100-sdar-8b,lmdeploy-bd32"
    pools, links = [f"prefill:1@{server}", f"decode:1@{server}"], ["450GB/s,10us"]
    file = Path("split.toml")
    file.write_text(f'pools = {pools}\nlinks = {links}\nrouter = "least-tokens"\n')
    few = "--num-requests 100 --precision 50% --jobs 1"
    found = succeed("capacity azure-conv --slo p90:ttft=400ms", few, "--fleet", file, "--json -o out").json
    assert [pool["name"] for pool in found["pools"]] == ["prefill", "decode"]
    assert "of prefill" in Path("out/report.html").read_text()


def test_pools_and_replicas_are_refused_together() -> None:
    refusal = dsim("capacity azure-conv --slo ttft=2s --pool 1@h100-sdar-8b,ar --replicas 2").refusal
    assert "--pool is 1@h100-sdar-8b,ar and --replicas is 2" in refusal


def test_a_scaled_fleet_has_no_capacity() -> None:
    file = Path("scaled.toml")
    file.write_text('pools = ["1@h100-sdar-8b,ar"]\nscaler = "hpa,target=4"\n')
    refusal = dsim("capacity azure-conv --slo ttft=2s --fleet", str(file)).refusal
    assert "scaler is hpa,target=4, expected pools of a fixed count" in refusal
