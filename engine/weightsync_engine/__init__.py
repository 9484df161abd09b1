"""The in-pod engine of weightsync. It never imports kopf or a Kubernetes client.

`Publisher` and its errors are imported on first use: `weightsync_engine.protocol` stays free of torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .trainer import (
        Handle,
        Publisher,
        PublishError,
        PublishTimeout,
        RoundFailed,
        Superseded,
        checkpoint_names,
    )

__all__ = [
    "Handle",
    "PublishError",
    "PublishTimeout",
    "Publisher",
    "RoundFailed",
    "Superseded",
    "checkpoint_names",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from . import trainer

        return getattr(trainer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
