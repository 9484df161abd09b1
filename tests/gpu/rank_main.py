"""One rank of a plan on a GPU: `python -m tests.gpu.rank_main JOB RANK`. Prints what is wrong, as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
import time
import zlib
from pathlib import Path

import torch

from weightsync_engine.layout.boxes import Box
from weightsync_engine.layout.codec import decode_sources, decode_worker
from weightsync_engine.layout.shards import shard_boxes
from weightsync_engine.layout.tensors import DTYPE_BYTES, SlabTensor
from weightsync_engine.mover.slab import plan_slab
from weightsync_engine.plan.compile import compile_plan
from weightsync_engine.plan.groups import Worker
from weightsync_engine.plan.plan import LocalPart
from weightsync_engine.protocol.messages import Rendezvous
from weightsync_engine.transport.choose import choose
from weightsync_engine.transport.store import EpochStore, connect_store


def index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))


def main() -> None:
    job, rank = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    trainers = job["trainers"]
    sources = decode_sources(job["sources"].encode())
    workers = [Worker(w["rank"], w["server"], decode_worker(w["manifest"].encode())) for w in job["workers"]]
    torch.cuda.set_device(rank % torch.cuda.device_count())
    kind = choose(job["transport"], "cuda", rank)
    # Stacks of any size, where the transport takes them.
    stack_bytes = min(kind.envelope.stack_bytes, 1)
    limits = dataclasses.replace(kind.envelope, max_local_bytes=job["step_bytes"], stack_bytes=stack_bytes)
    kind.configure(limits)
    plan = compile_plan(sources, workers, trainers, limits)
    steps = plan.local(rank, kind.collective)

    def value(tensor: str, shape: tuple[int, ...], dtype: str, turn: int) -> torch.Tensor:
        """All bit patterns, those of NaNs too; the same on every rank."""
        seed = zlib.crc32(f"{tensor} {turn}".encode())
        size = math.prod(shape) * DTYPE_BYTES[dtype]
        bits = torch.randint(
            0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
        )
        return bits.view(getattr(torch, dtype)).view(shape).cuda()

    places: dict[str, SlabTensor]
    if rank < trainers:
        held = {}
        for s in sources:
            box = shard_boxes(s).get(rank)
            if box is not None:
                held[s.tensor] = (s, box)
        places, size = plan_slab((name, box.shape, s.dtype) for name, (s, box) in held.items())
    else:
        manifest = workers[rank - trainers].manifest
        places, size = plan_slab((n, t.shape, t.dtype) for n, t in manifest.tensors.items())
    memory = torch.zeros(max(size, 1), dtype=torch.uint8, device="cuda")

    def tensor(name: str) -> torch.Tensor:
        place = places[name]
        flat = memory[place.offset : place.offset + math.prod(place.shape) * DTYPE_BYTES[place.dtype]]
        return flat.view(getattr(torch, place.dtype)).view(place.shape)

    def local(part: LocalPart) -> torch.Tensor:
        return tensor(part.tensor)[index(part.box)]

    host, port = job["store"].rsplit(":", 1)
    raw = connect_store(Rendezvous(host=host, port=int(port)), time.monotonic() + 60, lambda: False)
    store = EpochStore(raw, job["name"], "key", rank)
    transport = kind(store, rank, trainers + len(workers), host, time.monotonic() + 60)
    wrong: list[str] = []
    for turn in range(job["rounds"]):
        if rank < trainers:
            for s, box in held.values():
                whole = value(s.tensor, s.tensor_shape, s.dtype, turn)
                tensor(s.tensor).view(torch.uint8).copy_(whole[index(box)].contiguous().view(torch.uint8))
        else:
            memory.fill_(77)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        begun = 0
        for step in steps:
            transport.begin(step, local)
            begun += 1
            if begun == transport.depth:
                transport.finish(30, lambda n: None)
                begun -= 1
        for _ in range(begun):
            transport.finish(30, lambda n: None)
        if turn == 0:
            staged = torch.cuda.max_memory_allocated() - before
        if rank >= trainers:
            untouched = memory.clone()
            by_name = {s.name: s for s in sources}
            for piece in manifest.pieces:
                s = by_name[piece.name]
                whole = value(s.tensor, s.tensor_shape, s.dtype, turn)[index(s.region)].reshape(s.shape)
                want = whole[index(piece.box)].contiguous().view(torch.uint8).reshape(-1)
                got = tensor(piece.tensor)[index(piece.region)].contiguous().view(torch.uint8).reshape(-1)
                if not torch.equal(got, want):
                    wrong.append(f"round {turn}: {piece.name}")
                place = places[piece.tensor]
                flat = untouched[
                    place.offset : place.offset + math.prod(place.shape) * DTYPE_BYTES[place.dtype]
                ]
                kind_ = getattr(torch, place.dtype)
                flat.view(kind_).view(place.shape)[index(piece.region)].view(torch.uint8).fill_(77)
            if not bool((untouched == 77).all()):
                wrong.append(f"round {turn}: memory beside the pieces was written")
    transport.close()
    Path(job["out"], f"{job['name']}-{rank}.json").write_text(
        json.dumps({
            "wrong": wrong, "steps": len(plan.steps), "stacked": len(plan.stacked), "staged": staged,
            "share": max((s.local_bytes for s in steps), default=0),
            "parts": max((sum(len(b.parts) for b in s.blocks) for s in steps), default=0),
        })
    )  # fmt: skip
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
