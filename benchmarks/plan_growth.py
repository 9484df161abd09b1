"""How long planning takes and how much memory, for three sizes: `python -m benchmarks.plan_growth`.

Each size runs in a process of its own. Times are of one core, best and median of the repeats; memory is what
the process's peak grew by while it planned. `wire` is what the trainer and one server's workers put into the
epoch's store; `keeps` is what one rank has to keep after joining.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

from benchmarks import tables
from weightsync_engine.layout.codec import encode_sources, encode_worker
from weightsync_engine.plan.compile import compile_plan
from weightsync_engine.plan.cost import rank_costs

SIZES = {
    "Qwen3-8B, FSDP 8 -> TP 8": (tables.QWEN3_8B, (1, 1, 8), (1, 8, False)),
    "Qwen3-30B-A3B, EP 8 x FSDP 8 -> 16 x EP 4": (tables.QWEN3_30B_A3B, (1, 8, 8), (16, 4, True)),
    "DeepSeek-V3, PP 8 x EP 32 x FSDP 4 -> 384 x EP 8": (tables.DEEPSEEK_V3, (8, 32, 4), (384, 8, True)),
}


def peak() -> int:
    """Bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(size: str, repeats: int) -> dict[str, Any]:
    model, (pipeline, experts, fsdp), (servers, tensor, expert_parallel) = SIZES[size]
    trainers = pipeline * experts * fsdp
    sources = tables.sources(model, pipeline, experts, fsdp)
    workers = tables.workers(model, trainers, servers, tensor, expert_parallel)
    before = peak()
    seconds: list[float] = []
    for _ in range(repeats):
        gc.collect()
        start = time.perf_counter()
        plan = compile_plan(sources, workers, trainers)
        seconds.append(time.perf_counter() - start)
    start = time.perf_counter()
    digest = plan.digest
    hashed = time.perf_counter() - start
    start = time.perf_counter()
    sent, received = plan.local(0), plan.local(trainers)
    local = time.perf_counter() - start
    grown = peak() - before
    kept = [sum(len(b.parts) for s in steps for b in s.blocks) for steps in (sent, received)]
    costs = rank_costs(plan)[:trainers]
    mean = sum(c.bytes_sent for c in costs) / trainers
    held = sum(r.copies * len(plan.groups[r.group].servers) * _bytes(r.source) for r in plan.routes)
    assert plan.bytes_received == held, "bytes received are not the bytes kept"
    return {
        "parameters": len(sources),
        "ranks": trainers + len(workers),
        "pieces": sum(len(w.manifest.pieces) for w in workers),
        "compile_best_s": min(seconds),
        "compile_median_s": statistics.median(seconds),
        "digest_s": hashed,
        "local_of_two_ranks_s": local,
        "peak_growth_bytes": grown,
        "steps": len(plan.steps),
        "steps_of_rank_0": len(sent),
        "steps_of_first_worker": len(received),
        "keeps_parts": kept,
        "most_over_mean_sent": max(c.bytes_sent for c in costs) / mean,
        "bytes_received": plan.bytes_received,
        "wire_sources_bytes": len(encode_sources(tuple(sources))),
        "wire_one_server_bytes": sum(len(encode_worker(w.manifest)) for w in workers[:tensor]),
        "digest": digest,
    }


def _bytes(source: Any) -> int:
    return int(tables.Box.whole(source.shape).size) * tables.DTYPE_BYTES[source.dtype]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=list(SIZES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="of the one size, for --only")
    options = parser.parse_args()
    if options.only:
        result = measure(options.only, options.repeats)
        print(json.dumps(result, indent=None if options.json else 1))
        return
    print(
        f"{'size':50} {'ranks':>6} {'params':>7} {'pieces':>9} {'compile':>9} {'per piece':>10} {'memory':>9}"
    )
    for size in SIZES:
        command = [sys.executable, "-m", "benchmarks.plan_growth", "--only", size, "--json"]
        out = subprocess.run(
            [*command, "--repeats", str(options.repeats)], stdout=subprocess.PIPE, check=True, timeout=600
        )
        r = json.loads(out.stdout)
        print(
            f"{size:50} {r['ranks']:6} {r['parameters']:7} {r['pieces']:9} {r['compile_best_s'] * 1e3:6.0f} ms "
            f"{r['compile_best_s'] / r['pieces'] * 1e6:7.2f} us {r['peak_growth_bytes'] / 2**20:6.0f} MiB"
        )
        print(
            f"{'':50} steps {r['steps']} (rank 0: {r['steps_of_rank_0']}, a worker: {r['steps_of_first_worker']}), "
            f"parts kept {r['keeps_parts']}, most/mean sent {r['most_over_mean_sent']:.3f}, "
            f"wire {r['wire_sources_bytes'] / 2**20:.1f} + {r['wire_one_server_bytes'] / 2**20:.1f} MiB, "
            f"digest {r['digest_s'] * 1e3:.0f} ms, local {r['local_of_two_ranks_s'] * 1e3:.0f} ms"
        )


if __name__ == "__main__":
    main()
