"""One trainer rank of the soak: `trainer_main.py CHECKPOINT...`, driven by lines on stdin, answering in JSON lines.

`publish <version> <number of the checkpoint>` puts that checkpoint's weights into the sharded parameters, as an
optimizer step would, and publishes them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.integration.vllm import tiny
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from weightsync_engine import Publisher, PublishError

OUT = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # whatever prints on stdout is no report


def report(value: Any) -> None:
    print(json.dumps(value), file=OUT, flush=True)


def main(checkpoints: list[Path]) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def shards(folder: Path) -> dict[str, DTensor]:
        return {n: distribute_tensor(t, mesh, [Shard(0)]) for n, t in sorted(tiny.load(folder).items())}

    values = [shards(folder) for folder in checkpoints]
    model = {
        name: distribute_tensor(tensor, mesh, [Shard(0)])
        for name, tensor in tiny.load(checkpoints[0]).items()
    }
    publisher = Publisher(sorted(model.items()), timeout=60)
    report({"pid": os.getpid(), "port": publisher.port})
    while line := sys.stdin.readline().split():
        _, version, number = line
        with torch.no_grad():
            for name, tensor in model.items():
                tensor.to_local().copy_(values[int(number)][name].to_local())
        began = time.monotonic()
        error = ""
        try:
            publisher.publish(version, on_busy="wait")
        except PublishError as e:
            error = str(e)
        report({"ms": 1e3 * (time.monotonic() - began), "error": error})
    publisher.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main([Path(folder) for folder in sys.argv[1:]])
