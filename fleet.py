"""The names that a router or a scaler of your own imports (docs/fleet.md)."""

from .engine.errors import PolicyError as PolicyError
from .sim.routers import routing as routing
from .sim.routers.router import ReplicaView as ReplicaView
from .sim.routers.router import RequestView as RequestView
from .sim.routers.router import Router as Router
from .sim.routers.sent import SentNames as SentNames
from .sim.scalers.scaler import PoolView as PoolView
from .sim.scalers.scaler import Scaler as Scaler
from .sim.scalers.wishes import Wishes as Wishes
