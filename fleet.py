"""The names that a router, a decider or a scaler of your own imports (docs/fleet.md, docs/split-fleets.md)."""

from .engine.errors import PolicyError as PolicyError
from .sim.deciders import Decider as Decider
from .sim.deciders import DecodeView as DecodeView
from .sim.routers import routing as routing
from .sim.routers.router import ReplicaView as ReplicaView
from .sim.routers.router import RequestView as RequestView
from .sim.routers.router import Router as Router
from .sim.routers.sent import SentNames as SentNames
from .sim.scalers.scaler import PoolView as PoolView
from .sim.scalers.scaler import Scaler as Scaler
from .sim.scalers.wishes import Wishes as Wishes
