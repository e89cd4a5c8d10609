"""The names that a policy of your own imports: parts, questions, the view and `rule` (docs/policy-of-your-own.md).

A policy is a few parts (Scheduler, Discipline, Granularity, Eviction, Cache, Unmasking, PagedMemory). A part answers
questions (`hooks`) in plain Python and NumPy, or with compiled rules, from what a `View` shows.
"""

from .engine import hooks as hooks
from .engine.errors import PolicyError as PolicyError
from .engine.jit import rule as rule
from .engine.part import Answers as Answers
from .engine.part import Cache as Cache
from .engine.part import Choice as Choice
from .engine.part import Discipline as Discipline
from .engine.part import Eviction as Eviction
from .engine.part import ExactCache as ExactCache
from .engine.part import Granularity as Granularity
from .engine.part import PagedMemory as PagedMemory
from .engine.part import Policy as Policy
from .engine.part import Preset as Preset
from .engine.part import Range as Range
from .engine.part import Rows as Rows
from .engine.part import Scheduler as Scheduler
from .engine.part import wraps as wraps
from .engine.policies.chunk import FixedChunk as FixedChunk
from .engine.policies.delayed_cache import DelayedCache as DelayedCache
from .engine.policies.lmdeploy_2025 import EVERY_STEP as EVERY_STEP
from .engine.policies.lmdeploy_2025 import Continuous as Continuous
from .engine.policies.multi_block import Buffer as Buffer
from .engine.policies.whole_block import FixedBlock as FixedBlock
from .engine.state import CACHED as CACHED
from .engine.state import MASKED as MASKED
from .engine.state import PENDING as PENDING
from .engine.state import Marks as Marks
from .engine.state import Status as Status
from .engine.unmasking import Unmasking as Unmasking
from .engine.view import RequestView as RequestView
from .engine.view import View as View
from .engine.view import class_of as class_of
from .engine.view import inner as inner
