"""One round over the GPUs of this host, by every transport and beside what it is compared with.

    python -m benchmarks.gpu_round
    python -m benchmarks.gpu_round --gpus 2 --trainers 1 --workers 1 --model qwen3-8b

Without a shape it runs the standard ones for this host's GPUs, half of them trainers: to one server cut over the other
half, to a server on each of them, and a model of experts to one server that is expert parallel.

One process a rank, all on this host; ranks share GPUs where there are fewer of those (then start CUDA MPS, and set
NCCL_MULTI_RANK_GPU_ENABLE=1). Everything is moved for real and compared bit for bit at the end of each way. Ways:

    nccl_m2n, nccl_p2p    our plan, by our transports
    per_parameter         one reshard a parameter, fused ones and experts whole to every worker: the plan of vLLM's M2N
    broadcast             plain NCCL, every trainer's shard to all ranks in messages of 1 GiB, nothing unpacked: less
                          than what an all-gather and a broadcast cost
    plain                 send/recv by plain NCCL, each rank's bytes as messages of 1 GiB (as many trainers as workers)

Times are of the slowest rank, in milliseconds: best and median of the rounds after two that warm up. Bytes a second
are of the rank that sends or receives most, and a share of what NVLink gives one way where each rank has a GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import torch

from benchmarks import tables
from weightsync_engine.layout.boxes import Box
from weightsync_engine.layout.shards import shard_boxes
from weightsync_engine.layout.tensors import DTYPE_BYTES, SlabTensor
from weightsync_engine.mover.slab import plan_slab
from weightsync_engine.plan.compile import compile_plan
from weightsync_engine.plan.cost import rank_costs
from weightsync_engine.plan.plan import LocalPart
from weightsync_engine.transport.base import Transport
from weightsync_engine.transport.choose import choose, envelope
from weightsync_engine.transport.store import EpochStore, connect_store, open_store

MODELS = {
    "qwen3-8b": tables.QWEN3_8B,
    "qwen3-1.7b": tables.QWEN3_1_7B,
    "qwen3-30b-a3b": tables.QWEN3_30B_A3B,
    "tiny": tables.Model("tiny", 256, 3, 1000, tables.Attention(8, 2, 32), 512, 3),
}
WARM = 2


class Slab:
    """Device memory of one rank, without the parts that a mover needs."""

    def __init__(self, places: dict[str, SlabTensor], size: int) -> None:
        self.memory = torch.zeros(size, dtype=torch.uint8, device="cuda")
        self.places = places

    def tensor(self, name: str) -> torch.Tensor:
        place = self.places[name]
        size = math.prod(place.shape) * DTYPE_BYTES[place.dtype]
        flat = self.memory[place.offset : place.offset + size]
        return flat.view(getattr(torch, place.dtype)).view(place.shape)

    def local(self, part: LocalPart) -> torch.Tensor:
        return self.tensor(part.tensor)[_index(part.box)]


def _index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))


class Rank:
    def __init__(self, options: argparse.Namespace, rank: int, store: EpochStore) -> None:
        self.options, self.rank, self.store = options, rank, store
        self.world = options.trainers + options.workers
        model = MODELS[options.model]
        self.sources = tables.sources(model, 1, options.experts, options.trainers // options.experts)
        tensor = options.tensor or options.workers
        self.workers = tables.workers(
            model, options.trainers, options.workers // tensor, tensor, options.expert_parallel
        )
        self.sends = rank < options.trainers
        if self.sends:
            self.boxes = {s.name: b for s in self.sources if (b := shard_boxes(s).get(rank)) is not None}
            kinds = {s.name: s.dtype for s in self.sources}
            self.slab = Slab(*plan_slab((n, self.boxes[n].shape, kinds[n]) for n in self.boxes))
        else:
            self.manifest = self.workers[rank - options.trainers].manifest
            places = self.manifest.tensors
            size = max(p.offset + math.prod(p.shape) * DTYPE_BYTES[p.dtype] for p in places.values())
            self.slab = Slab(places, size)
        self.shapes = {s.name: (s.shape, s.dtype) for s in self.sources}
        self.turn = 0

    def value(self, name: str) -> torch.Tensor:
        """What a parameter is in this turn; the same on every rank."""
        shape, dtype = self.shapes[name]
        generator = torch.Generator("cuda").manual_seed(zlib.crc32(name.encode()) + self.turn)
        bits = torch.randint(0, 1 << 15, shape, dtype=torch.int16, device="cuda", generator=generator)
        return bits.view(torch.bfloat16) if dtype == "bfloat16" else bits.to(getattr(torch, dtype))

    def fill(self) -> None:
        self.turn += 1
        if self.sends:
            for name, box in self.boxes.items():
                self.slab.tensor(name).copy_(self.value(name)[_index(box)])
        else:
            self.slab.memory.zero_()
        torch.cuda.synchronize()

    def wrong(self) -> list[str]:
        """Pieces whose bits are not what was sent."""
        found = []
        for piece in [] if self.sends else self.manifest.pieces:
            got = self.slab.tensor(piece.tensor)[_index(piece.region)].reshape(piece.box.shape)
            want = self.value(piece.name)[_index(piece.box)]
            if not torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8)):
                found.append(piece.name)
        return found

    def meet(self, name: str) -> None:
        """All ranks are here."""
        until = time.monotonic() + 120
        self.store.put(f"meet/{name}/{self.rank}", b"1")
        self.store.get_all({f"meet/{name}/{r}": r for r in range(self.world)}, until, "it to come")

    def rounds(self, name: str, transport: Any, once: Any, check: bool = True) -> dict[str, Any]:
        from nccl.core import SUM

        self.fill()
        self.meet(name)
        together = torch.zeros(1, device="cuda")
        seconds = []
        for _ in range(WARM + self.options.rounds):
            # Leaves all ranks within microseconds of each other, which the store does not.
            transport._comm.allreduce(together, together, SUM, stream=transport._stream)
            torch.cuda.synchronize()
            start = time.perf_counter()
            once()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        result = {"seconds": seconds[WARM:], "wrong": self.wrong() if check else []}
        if self.options.profile:
            result["kernels"] = self.profile(name, transport, once)
        return result

    def profile(self, name: str, transport: Any, once: Any) -> list[tuple[str, int, float]]:
        """(kernel, calls, milliseconds) of one more round on this rank's GPU, longest first."""
        from nccl.core import SUM
        from torch.profiler import ProfilerActivity, profile

        self.meet(f"{name}/profile")
        together = torch.zeros(1, device="cuda")
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            transport._comm.allreduce(together, together, SUM, stream=transport._stream)
            once()
            torch.cuda.synchronize()
        found = [(e.key[:90], e.count, e.device_time_total / 1e3) for e in seen.key_averages()]
        return sorted(found, key=lambda k: -k[2])[:12]

    # -- ways ------------------------------------------------------------------------------------------------

    def ours(self, name: str) -> dict[str, Any]:
        kind: type[Transport] = choose(name, "cuda", self.rank)
        start = time.perf_counter()
        limits = envelope(kind, os.environ, self.rank)
        kind.configure(limits)
        plan = compile_plan(self.sources, self.workers, self.options.trainers, limits)
        steps = plan.local(self.rank, kind.collective)
        planned = time.perf_counter() - start
        start = time.perf_counter()
        scoped = self.scoped(name)
        transport = kind(scoped, self.rank, self.world, "127.0.0.1", time.monotonic() + 120)
        connected = time.perf_counter() - start

        def once() -> None:
            begun = 0
            for step in steps:
                transport.begin(step, self.slab.local)
                begun += 1
                if begun == transport.depth:
                    transport.finish(60, lambda n: None)
                    begun -= 1
            for _ in range(begun):
                transport.finish(60, lambda n: None)

        result = self.rounds(name, transport, once)
        transport.close()
        cost = rank_costs(plan)[self.rank]
        return {
            **result,
            "steps": len(plan.steps),
            "plan_s": planned,
            "connect_s": connected,
            "bytes": cost.bytes_sent + cost.bytes_received,
        }

    def scoped(self, name: str) -> EpochStore:
        raw = self.store._store
        return EpochStore(raw, f"bench/{name}", "key", self.rank)

    def per_parameter(self) -> dict[str, Any]:
        """As vLLM's backend plans: what is not fused goes direct, what is fused goes whole to every worker."""
        from nccl import m2n

        from weightsync_engine.transport.nccl import M2NTransport

        transport = M2NTransport(
            self.scoped("peer"), self.rank, self.world, "127.0.0.1", time.monotonic() + 120
        )
        trainers, workers = self.options.trainers, self.options.workers
        tensor = self.options.tensor or workers
        everywhere = m2n.Mesh((workers, 1), trainers), (m2n.Replicate(), m2n.Shard(0))
        servers = m2n.Mesh((workers // tensor, tensor), trainers)
        calls: list[tuple[Any, ...]] = []
        pieces = {} if self.sends else {p.name: p for p in self.manifest.pieces}
        whole_bytes = 0
        largest = max(math.prod(s.shape) for s in self.sources if s.dtype == "bfloat16")
        spare = torch.empty(0 if self.sends else largest, dtype=torch.bfloat16, device="cuda")
        for source in self.sources:
            module = source.name.split(".")[-2]
            fused = module in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj") or len(source.shape) == 1
            cut = {"o_proj": 1, "down_proj": 1}.get(module, 0)
            whole = fused or ".experts." in source.name
            replicated = module == "gate"
            mesh, placements = servers, (m2n.Replicate(), m2n.Shard(cut))
            if whole or replicated:
                mesh, placements = everywhere
            owners = source.mesh.ranks
            shape, local = list(source.shape), list(source.shape)
            shape[0] //= len(owners)
            if not (whole or replicated):
                local[cut] //= tensor
            piece = pieces.get(source.name)
            region = None if piece is None else self.slab.tensor(piece.tensor)[_index(piece.region)]
            data, copy = region, None
            if self.sends:
                data = self.slab.tensor(source.name) if self.rank in owners else None
            elif whole:
                data = spare[: math.prod(local)].view(local)
                copy = None if piece is None else (region, data[_index(piece.box)])
            whole_bytes += math.prod(local) * DTYPE_BYTES[source.dtype]
            held = m2n.Mesh((len(owners),), owners[0])
            calls.append((data, tuple(shape), tuple(local), held, mesh, placements, source.dtype, copy))

        def once() -> None:
            stream = transport._stream
            with torch.cuda.stream(stream):
                for data, shape, local, held, mesh, placements, dtype, copy in calls:
                    m2n.reshard(
                        data if self.sends else None, None if self.sends else data, transport._comm, stream,
                        src_mesh=held, src_placements=(m2n.Shard(0),), src_local_shape=shape,
                        src_dtype=dtype, dst_mesh=mesh, dst_placements=placements, dst_local_shape=local,
                        dst_dtype=dtype, handle=transport._handle,
                    )  # fmt: skip
                    if copy is not None:
                        copy[0].copy_(copy[1])

        result = self.rounds("peer", transport, once)
        transport.close()
        return {**result, "steps": len(calls), "bytes": whole_bytes}

    def broadcast(self) -> dict[str, Any]:
        """Every trainer's shard to all ranks, as it lies."""
        from weightsync_engine.transport.nccl import P2PTransport

        transport = P2PTransport(
            self.scoped("broadcast"), self.rank, self.world, "127.0.0.1", time.monotonic() + 120
        )
        shards = [0] * self.options.trainers
        for source in self.sources:
            for root, box in shard_boxes(source).items():
                shards[root] += box.size * DTYPE_BYTES[source.dtype] if box else 0
        landing = [torch.empty(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(2)]
        messages = [(root, at) for root, size in enumerate(shards) for at in range(0, size, 1 << 30)]

        def once() -> None:
            for turn, (root, at) in enumerate(messages):
                size = min(1 << 30, shards[root] - at)
                data = (self.slab.memory[at:] if root == self.rank else landing[turn % 2])[:size]
                transport._comm.broadcast(data, data, root, stream=transport._stream)

        result = self.rounds("broadcast", transport, once, check=False)
        transport.close()
        return {**result, "steps": len(messages), "bytes": sum(shards)}

    def plain(self) -> dict[str, Any]:
        """As many bytes as our plan moves, from trainer i to worker i, without any plan."""
        from nccl.core import group

        from weightsync_engine.transport.nccl import P2PTransport

        transport = P2PTransport(
            self.scoped("plain"), self.rank, self.world, "127.0.0.1", time.monotonic() + 120
        )
        trainers = self.options.trainers
        total = sum(math.prod(s.shape) * DTYPE_BYTES[s.dtype] for s in self.sources) // trainers
        total = min(total, self.slab.memory.numel())
        peer = self.rank + trainers if self.sends else self.rank - trainers
        chunks = [self.slab.memory[i : min(i + (1 << 30), total)] for i in range(0, total, 1 << 30)]

        def once() -> None:
            for chunk in chunks:
                with group():
                    (transport._comm.send if self.sends else transport._comm.recv)(
                        chunk, peer, stream=transport._stream
                    )

        result = self.rounds("plain", transport, once, check=False)
        transport.close()
        return {**result, "steps": len(chunks), "bytes": total}


def run_rank(options: argparse.Namespace) -> None:
    rank = options.rank
    torch.cuda.set_device(rank % options.gpus if options.trainers + options.workers > options.gpus else rank)
    raw = connect_store(_rendezvous(options.store), time.monotonic() + 120, lambda: False)
    store = EpochStore(raw, "bench", "key", rank)
    made = Rank(options, rank, store)
    results: dict[str, Any] = {}
    for way in options.ways.split(","):
        do = {
            "nccl_m2n": lambda: made.ours("nccl_m2n"),
            "nccl_p2p": lambda: made.ours("nccl_p2p"),
            "per_parameter": made.per_parameter,
            "broadcast": made.broadcast,
            "plain": made.plain,
        }[way]
        try:
            results[way] = do()
        except Exception as e:
            import traceback

            traceback.print_exc()
            results[way] = {"error": f"{type(e).__name__}: {e}"[:500]}
            break  # the others wait in vain for this rank
        results[way]["memory"] = torch.cuda.max_memory_allocated()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    Path(options.out, f"rank-{rank}.json").write_text(json.dumps(results))
    os._exit(0)  # communicators that were aborted may hold up the interpreter's own end


def _rendezvous(where: str) -> Any:
    from weightsync_engine.protocol.messages import Rendezvous

    host, port = where.rsplit(":", 1)
    return Rendezvous(host=host, port=int(port))


def standard_shapes(gpus: int) -> list[list[str]]:
    """Half of the GPUs train: to one server over the other half, to one on each, and experts to one server."""
    half = str(max(gpus // 2, 1))
    shape = ["--trainers", half, "--workers", half]
    if half == "1":
        return [shape]
    experts = ["--model", "qwen3-30b-a3b", "--experts", half, "--expert-parallel", "--rounds", "3"]
    return [shape, [*shape, "--tensor", "1"], [*shape, *experts]]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--gpus", type=int, default=torch.cuda.device_count())
    made.add_argument("--trainers", type=int, default=0)
    made.add_argument("--workers", type=int, default=0)
    made.add_argument(
        "--tensor", type=int, default=0, help="workers of one server; default: all are one server"
    )
    made.add_argument("--experts", type=int, default=1, help="expert parallel size of the trainer")
    made.add_argument("--expert-parallel", action="store_true", help="in the servers")
    made.add_argument("--model", choices=list(MODELS), default="qwen3-8b")
    made.add_argument("--rounds", type=int, default=7)
    made.add_argument("--ways", default="nccl_m2n,nccl_p2p,per_parameter,broadcast,plain")
    made.add_argument(
        "--profile", action="store_true", help="and which kernels a round's time on each GPU goes to"
    )
    made.add_argument(
        "--nvlink", type=float, default=450, help="GB/s in one direction; the default is an H200's"
    )
    made.add_argument("--out", default="build/gpu_round")
    made.add_argument("--limit", type=int, default=240, help="seconds for all of a shape")
    made.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    made.add_argument("--store", default="", help=argparse.SUPPRESS)
    return made


def main(arguments: list[str]) -> None:
    options = parser().parse_args(arguments)
    if options.rank >= 0:
        run_rank(options)
        return
    if options.gpus < 1:
        raise SystemExit("there is no GPU: this benchmark measures nothing without one")
    if bool(options.trainers) != bool(options.workers):
        raise SystemExit("give both --trainers and --workers, or neither for the standard shapes")
    shapes = [[]] if options.trainers else standard_shapes(options.gpus)
    told = []
    for shape in shapes:
        told.append(measure([*arguments, *shape, "--gpus", str(options.gpus)]))
    Path(options.out, "result.json").write_text(json.dumps(told, indent=1))


def measure(arguments: list[str]) -> dict[str, Any]:
    """One shape: starts its ranks, prints its table, and returns what it found."""
    options = parser().parse_args(arguments)
    tensor, world = options.tensor or options.workers, options.trainers + options.workers
    if options.workers % tensor or options.trainers % options.experts:
        raise SystemExit(
            f"--workers {options.workers} must be whole servers of --tensor {tensor}, and --trainers "
            f"{options.trainers} a multiple of --experts {options.experts}"
        )
    if options.trainers != options.workers and "plain" in options.ways.split(","):
        raise SystemExit("the way plain needs as many trainers as workers: leave it out of --ways")
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("rank-*.json"):
        old.unlink()
    store, where = open_store("127.0.0.1")
    # Ours takes a buffer of a step's size; a whole embedding, as the peer sends it, needs M2N's own default beside it.
    environment = {"NCCL_RESHARD_PACK_BUFFSIZES": "256m:1,2048m:4"} | os.environ
    ranks = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "benchmarks.gpu_round", *arguments),
                *("--rank", str(rank), "--store", f"{where.host}:{where.port}"),
            ],
            env=environment,
        )
        for rank in range(world)
    ]
    until = time.monotonic() + options.limit
    try:
        for process in ranks:
            process.wait(max(until - time.monotonic(), 1))
    except subprocess.TimeoutExpired:
        raise SystemExit(f"the ranks were not done within {options.limit} s (--limit)") from None
    finally:
        for process in ranks:
            process.kill()
    del store
    results = [json.loads((out / f"rank-{r}.json").read_text()) for r in range(world)]
    found = summary(options, results)
    print(json.dumps(found, indent=1))
    print(table(options, results), flush=True)
    for rank, told in enumerate(results):
        for way, result in told.items():
            for kernel, calls, ms in result.get("kernels", ()):
                print(f"rank {rank} {way:14} {ms:8.2f} ms {calls:5} x {kernel}")
    return found


def summary(options: argparse.Namespace, results: list[dict[str, Any]]) -> dict[str, Any]:
    ways: dict[str, Any] = {}
    for way in options.ways.split(","):
        told = [r.get(way, {"error": "not reached"}) for r in results]
        errors = [t["error"] for t in told if "error" in t]
        if errors:
            ways[way] = {"error": errors[0]}
            continue
        slowest = [max(s) for s in zip(*(t["seconds"] for t in told), strict=True)]
        ways[way] = {
            "best_ms": min(slowest) * 1e3,
            "median_ms": statistics.median(slowest) * 1e3,
            "steps": told[0]["steps"],
            "most_bytes": max(t["bytes"] for t in told),
            "wrong": sorted({n for t in told for n in t["wrong"]})[:5],
            "peak_memory": max(t["memory"] for t in told),
            **{k: told[0][k] for k in ("plan_s", "connect_s") if k in told[0]},
        }
    return {
        "model": options.model,
        "gpus": options.gpus,
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "trainers": options.trainers,
        "workers": options.workers,
        "tensor": options.tensor or options.workers,
        "experts": options.experts,
        "date": time.strftime("%Y-%m-%d"),
        "ways": ways,
    }


def table(options: argparse.Namespace, results: list[dict[str, Any]]) -> str:
    ways = summary(options, results)["ways"]
    base = ways.get("per_parameter", {}).get("median_ms")
    alone = options.trainers + options.workers <= options.gpus
    lines = [f"{'way':16}{'best':>9}{'median':>9}{'GB/s':>8}{'NVLink':>8}{'x peer':>8}  steps  bits"]
    for way, w in ways.items():
        if "error" in w:
            lines.append(f"{way:16} failed: {w['error']}")
            continue
        ratio = f"{w['median_ms'] / base:.2f}" if base else "-"
        rate = w["most_bytes"] / w["median_ms"] / 1e6
        share = f"{rate / options.nvlink:.0%}" if alone else "-"
        bits = "right" if not w["wrong"] else f"WRONG: {w['wrong']}"
        lines.append(
            f"{way:16}{w['best_ms']:9.1f}{w['median_ms']:9.1f}{rate:8.0f}{share:>8}{ratio:>8}  {w['steps']:5}  {bits}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main(sys.argv[1:])
