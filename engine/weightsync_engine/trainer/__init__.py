"""The training side: `Publisher`, one for each trainer rank."""

from .handle import Handle, HandleState, PublishError, PublishTimeout, RoundFailed, Superseded
from .publisher import Publisher
from .sources import checkpoint_names

__all__ = [
    "Handle",
    "HandleState",
    "PublishError",
    "PublishTimeout",
    "Publisher",
    "RoundFailed",
    "Superseded",
    "checkpoint_names",
]
