"""A new combination of rules that are there: chunks of half a block, and LMDeploy's frozen groups around them."""

from dsim.engine.policies.chunk import FixedChunk
from dsim.engine.policies.delayed_cache import DelayedCache
from dsim.engine.policies.lmdeploy import Continuous
from dsim.engine.policy import Policy

POLICY = Policy("grouped-chunk", Continuous(num_loops=4), FixedChunk(chunk=16), DelayedCache())
