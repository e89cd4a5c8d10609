"""The names that a policy of your own imports: parts, questions, records, and `rule` (docs/policy-of-your-own.md).

A policy is a few parts (Scheduler, Granularity, Eviction, Cache, Unmasking, PagedMemory). A part answers questions
(`hooks`), in plain Python and NumPy or with compiled rules over the records below.
"""

from .engine import hooks as hooks
from .engine.errors import PolicyError as PolicyError
from .engine.jit import rule as rule
from .engine.part import Answers as Answers
from .engine.part import Cache as Cache
from .engine.part import Choice as Choice
from .engine.part import Eviction as Eviction
from .engine.part import ExactCache as ExactCache
from .engine.part import Granularity as Granularity
from .engine.part import PagedMemory as PagedMemory
from .engine.part import Policy as Policy
from .engine.part import Preset as Preset
from .engine.part import Range as Range
from .engine.part import Rows as Rows
from .engine.part import Scheduler as Scheduler
from .engine.part import Waiting as Waiting
from .engine.policies.chunk import FixedChunk as FixedChunk
from .engine.policies.delayed_cache import DelayedCache as DelayedCache
from .engine.policies.lmdeploy import EVERY_STEP as EVERY_STEP
from .engine.policies.lmdeploy import Continuous as Continuous
from .engine.policies.whole_block import FixedBlock as FixedBlock
from .engine.records import F8 as F8
from .engine.records import I4 as I4
from .engine.records import I8 as I8
from .engine.records import U1 as U1
from .engine.records import Bool as Bool
from .engine.records import Record as Record
from .engine.records import columns_of as columns_of
from .engine.state import CACHED as CACHED
from .engine.state import MASKED as MASKED
from .engine.state import PENDING as PENDING
from .engine.state import ROWS as ROWS
from .engine.state import RUNNING as RUNNING
from .engine.state import AnyPolicy as AnyPolicy
from .engine.state import Counters as Counters
from .engine.state import Fixed as Fixed
from .engine.state import Marks as Marks
from .engine.state import PolicyState as PolicyState
from .engine.state import Replica as Replica
from .engine.state import RequestRow as RequestRow
from .engine.state import Sequence as Sequence
from .engine.state import Status as Status
from .engine.unmasking import Unmasking as Unmasking
