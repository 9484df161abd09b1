"""What a trainer pod's agent is told at its start."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class AgentConfig(BaseModel):
    """The line on stdin."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    parent: int
    """Process id of the training process."""
    run_id: str
    ranks: Annotated[tuple[int, ...], Field(min_length=1)]
    """Global trainer ranks of this pod, ascending; `movers` are their sockets in the same order."""
    world_size: int
    movers: tuple[str, ...]
    run_dir: str
    """Folder of the sockets; removed at the end."""
    port: Annotated[int, Field(ge=0, lt=65536)]
