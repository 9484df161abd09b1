"""The training loop of the fault tests: it never waits for a version, and is the witness of its own stalls.

Runs on every trainer rank like `examples/demo/train.py`, whose folder is on the path. It steps on and on, publishes
what `GO` names as soon as it is there, and prints JSON lines on rank 0: what was published, what transformers
generates from it, what was committed, and every second the longest step since the last such line: all of it, and
without the time in which a rank was ready to run and no core was free. What servers that start again take from the
other pods of a small machine is no stall of training.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from model import build, config
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from train import PROMPT, greedy

from weightsync_engine import Publisher
from weightsync_engine.trainer.handle import Handle, HandleState

GO = Path(os.environ.get("GO_FILE", "/tmp/go"))
PAUSE_SECONDS = 0.3
"""Between steps: the machine has other things to do."""


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def asked() -> str:
    """The version to publish now, once; empty: none."""
    try:
        version = GO.read_text().strip()
        GO.unlink()
    except FileNotFoundError:
        return ""
    return version


def starved() -> float:
    """Milliseconds so far in which this thread was ready to run and had no core."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e6


class Loop:
    def __init__(self) -> None:
        self.lead = dist.get_rank() == 0
        self.model = build()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.base = [p.detach().clone() for p in self.locals()]
        self.publisher = Publisher(self.model)
        self.handles: dict[str, Handle] = {}

    def locals(self) -> list[torch.Tensor]:
        return [p.to_local() if isinstance(p, DTensor) else p for p in self.model.parameters()]

    def step(self) -> tuple[str, float]:
        """One training step on all ranks; what rank 0 was asked to publish, and for how long the rank that waited
        longest for a core did so."""
        before = starved()
        tokens = torch.randint(0, config().vocab_size, (2, 17))
        logits = self.model(tokens[:, :-1]).logits
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        said: list[tuple[str, float]] = [("", 0.0)] * dist.get_world_size()
        dist.all_gather_object(said, (asked() if self.lead else "", starved() - before))
        return said[0][0], max(waited for _, waited in said)

    @torch.no_grad()
    def move_on(self, version: str) -> None:
        """Weights of the version's own, so that answers tell versions apart however many there were."""
        seeded = torch.Generator().manual_seed(hash_of(version) + dist.get_rank())
        for tensor, base in zip(self.locals(), self.base, strict=True):
            spread = base.std().item() if base.numel() > 1 else 0.0
            tensor.copy_(base + 0.7 * spread * torch.randn(base.shape, generator=seeded))

    def publish(self, version: str) -> float:
        """Milliseconds that the call took."""
        self.move_on(version)
        began = time.monotonic()
        handle = self.publisher.publish(version)
        took = 1000 * (time.monotonic() - began)
        if handle.state is HandleState.SUPERSEDED:
            if self.lead:
                say(skipped=version, t=time.time())
            return took
        self.handles[version] = handle
        state = get_model_state_dict(
            self.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
        )
        if self.lead:
            say(published=version, t=time.time(), publish_ms=round(took, 1))
            say(greedy=version, prompt=PROMPT, tokens=greedy(state))
        return took

    def look(self) -> None:
        for version, handle in list(self.handles.items()):
            if handle.done():
                del self.handles[version]
                say(ended=version, how=str(handle.state), t=time.time())

    def run(self) -> None:
        if self.lead:
            say(run=uuid.uuid4().hex, t=time.time())
        longest, stall, told = 0.0, 0.0, time.monotonic()
        torch.manual_seed(1000 + dist.get_rank())
        while True:
            began = time.monotonic()
            version, waited = self.step()
            took = 1000 * (time.monotonic() - began)
            if version:
                before = starved()
                took += self.publish(version)
                waited += starved() - before
            longest, stall = max(longest, took), max(stall, took - waited)
            if self.lead:
                self.look()
                if time.monotonic() - told >= 1.0:
                    say(loop=time.time(), longest_ms=round(longest, 1), stall_ms=round(stall, 1))
                    longest, stall, told = 0.0, 0.0, time.monotonic()
            time.sleep(PAUSE_SECONDS)


def hash_of(version: str) -> int:
    """The same on every rank and in every run."""
    return sum(ord(c) * 31**i for i, c in enumerate(version)) % (1 << 31)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    Loop().run()
