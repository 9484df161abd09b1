"""A stand-in for a vLLM pod: `tp` workers in one process, each with slab and mover; the real agent.

`python server_main.py SHAPES TP RUN_DIR [ORDERS]`: SHAPES is a file of JSON, checkpoint name -> shape;
ORDERS is a folder of damage that the movers are to do (tests/integration/mover/damage.py). Each
holds its slice of dimension 0 where that divides, else the whole, all in bfloat16. Reports on stdout; a line
on stdin asks for the bits that are live.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
import uuid
from pathlib import Path

import torch
import uvicorn
from starlette.applications import Starlette
from tests.integration.mover.damage import damaging

from weightsync_engine.agent.core import AgentCore, make_pod
from weightsync_engine.agent.credentials import TokenVerifier
from weightsync_engine.agent.process import listen
from weightsync_engine.agent.routes import routes
from weightsync_engine.layout.boxes import Box
from weightsync_engine.layout.tensors import Expected, Piece, WorkerManifest
from weightsync_engine.mover.slab import Slab, plan_slab
from weightsync_engine.mover.supervisor import MoverSupervisor
from weightsync_engine.protocol.messages import FlipPolicy, Problem
from weightsync_engine.protocol.session import Flip


class Worker:
    def __init__(
        self, rank: int, tp: int, shapes: dict[str, list[int]], run_dir: Path, orders: Path | None
    ) -> None:
        self.boxes = {}
        for name, shape in shapes.items():
            whole = Box.whole(tuple(shape))
            if shape[0] % tp == 0:
                rows = shape[0] // tp
                whole = Box((rank * rows, *whole.start[1:]), (rows, *whole.shape[1:]))
            self.boxes[name] = whole
        self.places, size = plan_slab((n, b.shape, "bfloat16") for n, b in self.boxes.items())
        self.slab = Slab.create(size)
        self.live = {n: torch.zeros(b.shape, dtype=torch.bfloat16) for n, b in self.boxes.items()}
        manifest = WorkerManifest(
            expected={n: Expected(tuple(s), "bfloat16") for n, s in shapes.items()},
            pieces=tuple(Piece(n, b, n, (0,) * len(b.shape)) for n, b in self.boxes.items()),
            tensors=self.places,
            unresolved={},
        )
        kind = damaging(orders) if orders is not None else MoverSupervisor
        self.mover = kind("inference", rank, self.slab, manifest, run_dir)

    def flip(self) -> None:
        for name, place in self.places.items():
            self.live[name].copy_(self.slab.tensor(place))


class Server:
    problem: Problem | None = None

    def __init__(self, workers: list[Worker]) -> None:
        self._workers = workers
        self._version: str | None = None
        self.flips = 0

    @property
    def workers(self) -> int:
        return len(self._workers)

    async def flip(self, flip: Flip) -> None:
        self.flips += 1
        for worker in self._workers:
            worker.flip()
        self._version = flip.version

    held = False

    async def hold(self, policy: FlipPolicy, deadline_seconds: float) -> None:
        pass

    async def go_on(self) -> None:
        pass

    async def end_requests(self) -> None:
        pass

    async def live(self) -> tuple[str | None, bool]:
        return self._version, False


def live_bits(workers: list[Worker], shapes: dict[str, list[int]]) -> dict[str, str]:
    """The hash of each whole parameter, put together from the workers' slices."""
    bits = {}
    for name, shape in shapes.items():
        whole = torch.zeros(shape, dtype=torch.bfloat16)
        for worker in workers:
            box = worker.boxes[name]
            whole[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))] = worker.live[name]
        bits[name] = hashlib.sha256(whole.view(torch.uint8).numpy().tobytes()).hexdigest()
    return bits


async def main() -> None:
    shapes = json.loads(Path(sys.argv[1]).read_text())  # noqa: ASYNC240
    tp, run_dir = int(sys.argv[2]), Path(sys.argv[3])
    orders = Path(sys.argv[4]) if len(sys.argv) > 4 else None
    workers = [Worker(i, tp, shapes, run_dir, orders) for i in range(tp)]
    server = Server(workers)
    core = AgentCore(
        make_pod("inference", uuid.uuid4().hex, tp), [w.mover.socket_path for w in workers], server
    )
    sock = listen("127.0.0.1", 0)
    app = Starlette(routes=list(routes(core, TokenVerifier.from_environment())))
    http = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None, timeout_keep_alive=75))
    await core.start()
    serving = asyncio.create_task(http.serve(sockets=[sock]))
    print(json.dumps({"port": sock.getsockname()[1], "pid": os.getpid()}), flush=True)
    try:
        while await asyncio.to_thread(sys.stdin.readline):
            said = {
                "bits": live_bits(workers, shapes),
                "flips": server.flips,
                "movers": [w.mover.pid for w in workers],
            }
            print(json.dumps(said), flush=True)
    finally:
        http.should_exit = True
        await core.close()
        await serving
        for worker in workers:
            worker.mover.close()


if __name__ == "__main__":
    asyncio.run(main())
