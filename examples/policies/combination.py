"""A new combination of rules that are there: chunks of half a block, and LMDeploy's frozen groups around them."""

from dsim.policy import Continuous, DelayedCache, FixedChunk, Policy

POLICY = Policy("grouped-chunk", Continuous(num_loops=4), FixedChunk(chunk=16), DelayedCache())
