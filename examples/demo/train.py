"""The demo's training loop: FSDP2 on the CPU, one line of weightsync in it.

Run on every trainer rank with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set (torchrun or a StatefulSet does).
Trains a few steps, waits until `GO_DIR/<version>` exists (so that the demo sets the pace), publishes, and prints as
one JSON line what transformers generates greedily from the very weights that it published.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from model import build, config
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import Qwen3ForCausalLM

from weightsync_engine import Publisher

PROMPT = [1, 2, 3, 5, 8, 13, 21, 34]
NEW_TOKENS = 12
STEPS_PER_VERSION = 3
GO_DIR = Path(os.environ.get("GO_DIR", "/tmp/go"))


def wait_for_go(version: str, seconds: float = 1800) -> None:
    """All ranks wait for rank 0, which waits for the demo's word."""
    deadline = time.monotonic() + seconds
    while True:
        go = [dist.get_rank() == 0 and (GO_DIR / version).exists()]
        dist.broadcast_object_list(go, src=0)
        if go[0]:
            return
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"nobody asked for {version} within {seconds:.0f} s (touch {GO_DIR / version})"
            )
        time.sleep(0.1)


def greedy(state: dict[str, torch.Tensor]) -> list[int]:
    """What transformers continues PROMPT with, on a plain model with these weights."""
    reference = Qwen3ForCausalLM(config()).to(torch.float32).eval()
    reference.load_state_dict(state)
    prompt = torch.tensor([PROMPT])
    out = reference.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        pad_token_id=0,
    )
    return [int(t) for t in out[0, len(PROMPT) :]]


def main(versions: list[str]) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = build()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    publisher = Publisher(model)
    torch.manual_seed(1000 + dist.get_rank())
    for version in versions:
        for _ in range(STEPS_PER_VERSION):
            tokens = torch.randint(0, config().vocab_size, (2, 17))
            logits = model(tokens[:, :-1]).logits
            F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
        wait_for_go(version)
        started = time.monotonic()
        handle = publisher.publish(version)
        returned = time.monotonic()
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if dist.get_rank() == 0:
            print(
                json.dumps({"published": version, "publish_ms": round(1000 * (returned - started), 1)}),
                flush=True,
            )
            print(json.dumps({"greedy": version, "prompt": PROMPT, "tokens": greedy(state)}), flush=True)
        handle.wait(timeout=600)
        if dist.get_rank() == 0:
            seconds = time.monotonic() - started
            print(json.dumps({"committed": version, "seconds": round(seconds, 2)}), flush=True)
    wait_for_go("stop", seconds=7 * 86400)
    publisher.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:] or ["step-1", "step-2", "step-3"])
