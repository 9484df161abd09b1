"""One trainer rank of the integration tests: runs the cases that stdin names, reports JSON lines."""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from tests.integration.trainer.families import FAMILIES
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from weightsync_engine import Publisher, PublishError
from weightsync_engine.layout.shards import shard_boxes
from weightsync_engine.mover.slab import Slab
from weightsync_engine.trainer.merge import merge
from weightsync_engine.trainer.sources import Sources

OUT = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # whatever prints on stdout is no report


def report(value: Any) -> None:
    print(json.dumps(value), file=OUT, flush=True)


def wait_for_go() -> str:
    return sys.stdin.readline().strip()


def qwen(tied: bool = False, param_dtype: torch.dtype | None = None) -> Any:
    """A tiny Qwen3, sharded by FSDP2 over all ranks."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=1000,
            hidden_size=65,  # odd: uneven shards on two ranks and on three
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=128,
            tie_word_embeddings=tied,
        )
    ).to(torch.float32)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=param_dtype)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    tokens = torch.randint(0, 1000, (2, 9))
    model(tokens).logits.float().pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def bits(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def snapshot(publisher: Publisher) -> dict[str, str]:
    slab = publisher._slab
    assert slab is not None
    # Through a mapping of its own, as the mover sees it.
    seen = Slab.attach(os.dup(slab.fd))
    return {name: bits(seen.tensor(place)) for name, place in publisher._places.items()}


def stamp(publisher: Publisher) -> list[Any] | None:
    slab = publisher._slab
    found = slab.read_stamp() if slab is not None else None
    return None if found is None else [found.version, found.sequence]


def caught(action: Callable[[], Any]) -> dict[str, Any]:
    started = time.monotonic()
    try:
        action()
        return {"error": "", "seconds": time.monotonic() - started}
    except PublishError as e:
        return {"error": str(e), "type": type(e).__name__, "seconds": time.monotonic() - started}


def load(model: torch.nn.Module, folder: str) -> None:
    """A checkpoint's weights, into the shards that this rank has."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    weights = load_file(Path(folder) / "model.safetensors")
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True, strict=False))


# ---- cases -------------------------------------------------------------------------------------------------


def contract() -> None:
    """vLLM's trainer contract: meets the servers of the first line, then sends each checkpoint that a line names."""
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    from weightsync_engine.trainer.contract import ModelSource, Servers, TrainerInit

    given = json.loads(wait_for_go())
    model = AutoModelForCausalLM.from_pretrained(given["model"], dtype="auto").to(given["device"])
    mesh = init_device_mesh(given["device"], (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    init = TrainerInit(rank=dist.get_rank(), num_trainer_ranks=dist.get_world_size(), **given["init"])
    client = Servers([HTTPVLLMWeightSyncClient(url) for url in given["urls"]], given["workers"])
    made: list[Any] = []
    report(
        caught(
            lambda: made.append(
                WeightTransferTrainerFactory.trainer_init(init, client=client, source=ModelSource(model))
            )
        )
    )
    while (line := wait_for_go()) not in ("", "end"):
        version, folder = json.loads(line)
        load(model, folder)
        report(caught(lambda: made[0].send_weights(version)))  # noqa: B023
    for engine in made:
        engine.shutdown()
    report("ended")


def sources() -> None:
    """What FSDP2 shards look like to us, mixed precision and tied."""
    model = qwen(tied=True, param_dtype=torch.bfloat16)
    model.register_buffer("steps", torch.arange(3))
    model.register_buffer("scratch", torch.zeros(3), persistent=False)
    found = Sources(model)
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, [h.describe() for h in found.held()])
    merged = merge(said)
    report(
        {
            "names": [s.name for s in merged],
            "dtypes": {s.name: s.dtype for s in merged},
            "placements": {s.name: [repr(p) for p in s.placements] for s in merged},
            "ranks": {s.name: list(s.mesh.ranks) for s in merged},
            "shapes": {s.name: list(s.shape) for s in merged},
            "local": {h.name: list(h.local.shape) for h in found.held()},
            "aliases": found.aliases,
        }
    )


def sources_after_forward() -> None:
    """A forward pass without gradient leaves the root unsharded."""
    model = qwen()
    with torch.no_grad():
        model(torch.randint(0, 1000, (1, 4)))
    plain = [n for n, p in model.named_parameters() if not isinstance(p, DTensor)]
    held = Sources(model).held()
    report(
        {"plain_before": plain, "plain_after": [h.name for h in held if not isinstance(h.tensor, DTensor)]}
    )


def snapshots() -> None:
    """publish, train, publish: the snapshot holds what was published, bit for bit, in the wire dtype."""
    model = qwen(param_dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    with Publisher(model, timeout=60) as publisher:
        rounds = []
        for version in ("step-1", "step-2"):
            train(model, optimizer)
            expected = {
                h.name: bits(h.local.to(torch.bfloat16)) for h in publisher._sources.held() if h.local.numel()
            }
            publisher.publish(version)
            train(model, optimizer)
            rounds.append(
                {
                    "equal": snapshot(publisher) == expected,
                    "tensors": len(expected),
                    "stamp": stamp(publisher),
                }
            )
        report(rounds)
        report({"port": publisher.port, "run_dir": str(publisher._run_dir)})
        wait_for_go()


def snapshot_of(publisher: Publisher) -> dict[str, list[Any]]:
    """Checkpoint parameter -> [its elements that this rank's snapshot holds, as [start, shape], their bits]."""
    slab, manifest = publisher._slab, publisher._manifest
    assert slab is not None
    seen = Slab.attach(os.dup(slab.fd))
    found = {}
    for source in manifest.sources:
        shard = shard_boxes(source).get(dist.get_rank())
        inside = None if shard is None else shard.intersect(source.region)
        if shard is None or inside is None:
            continue
        tensor = seen.tensor(manifest.tensors[source.tensor])
        for dim, (start, extent) in enumerate(
            zip(inside.relative_to(shard.start).start, inside.shape, strict=True)
        ):
            tensor = tensor.narrow(dim, start, extent)
        leading = len(source.region.shape) - len(source.shape)
        box = inside.relative_to(source.region.start)
        found[source.name] = [box.start[leading:], box.shape[leading:], bits(tensor)]
    return found


def packed(tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """As tensor parallelism cuts `gate_up_proj [E, 2I, H]`: a part of each half on every rank."""
    halves = tensor.detach().chunk(2, dim=1)
    local = torch.cat([half.chunk(mesh.size(), dim=1)[mesh.get_rank()] for half in halves], dim=1)
    return DTensor.from_local(
        local,
        mesh,
        [_StridedShard(1, split_factor=2)],
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def stacked() -> None:
    """Models whose live names and stacking are not their checkpoints', sharded as trainers shard them."""
    from torch.distributed.fsdp import fully_shard

    world = dist.get_world_size()
    said = {}
    for family in ("qwen3-moe", "qwen2.5-vl", "mixtral, experts over ranks", "qwen3-moe, packed"):
        model = FAMILIES[family.partition(",")[0]]()
        folder = Path(tempfile.gettempdir()) / family
        model.save_pretrained(folder)  # only rank 0 writes
        dist.barrier()
        file = load_file(folder / "model.safetensors")
        mesh = init_device_mesh("cpu", (world,))
        if "packed" in family:
            for layer in model.model.layers:
                layer.mlp.experts.gate_up_proj = torch.nn.Parameter(
                    packed(layer.mlp.experts.gate_up_proj, mesh)
                )
        elif "," in family:
            for layer in model.model.layers:
                for name, tensor in list(layer.mlp.experts.named_parameters()):
                    part = distribute_tensor(tensor.detach(), mesh, [Shard(0)])
                    setattr(layer.mlp.experts, name, torch.nn.Parameter(part))
        else:
            for module in model.modules():
                if type(module).__name__.endswith("DecoderLayer"):
                    fully_shard(module, mesh=mesh)
            fully_shard(model, mesh=mesh)
        with Publisher(model, timeout=60) as publisher:
            publisher.publish("v1")
            held, wrong = snapshot_of(publisher), []
            for name, (start, shape, seen) in held.items():
                part = file[name]
                for dim, (a, n) in enumerate(zip(start, shape, strict=True)):
                    part = part.narrow(dim, a, n)
                wrong += [] if bits(part) == seen else [name]
            missing = file.keys() - {s.name for s in publisher._manifest.sources}
            said[family] = {
                "wrong": wrong, "missing": sorted(missing), "held": len(held),
                "elements": sum(math.prod(shape) for _, shape, _ in held.values()),
                "of": sum(t.numel() for t in file.values()),
                "tensors": len(publisher._places),
                "replicated": "," in family,
            }  # fmt: skip
    report(said)


def stages() -> None:
    """Pipeline stages: each rank has names of its own, and one that all have."""
    rank = dist.get_rank()
    across = torch.arange(6.0).reshape(2, 3).t()  # not contiguous
    pairs = [("all", across), (f"stage.{rank}", torch.full((4, 2), float(rank)))]
    cut = {f"stage.{rank}": [(f"layer.{2 * rank + i}", (2 * i, 0), (2, 2)) for i in range(2)]}
    with Publisher(pairs, names=cut, timeout=60) as publisher:
        publisher.publish("v1")
        report(
            {
                "across": snapshot(publisher)["all"] == bits(across),
                "sources": [[s.name, list(s.mesh.ranks), s.tensor] for s in publisher._manifest.sources],
                "tensors": sorted(publisher._manifest.tensors),
            }
        )


def errors() -> None:
    """Every mistake with publish, each answered on all ranks."""
    rank = dist.get_rank()
    model = qwen()
    publisher = Publisher(model, timeout=60)
    publisher.publish("step-1")
    said = {
        "used": caught(lambda: publisher.publish("step-1")),
        "empty": caught(lambda: publisher.publish("")),
        "invalid": caught(lambda: publisher.publish("step 1/x")),
        "not a string": caught(lambda: publisher.publish(7)),  # type: ignore[arg-type]
        "policy": caught(lambda: publisher.publish("v", on_busy="later")),  # type: ignore[arg-type]
        "different versions": caught(lambda: publisher.publish(f"step-of-{rank}")),
        "used on one rank": caught(lambda: publisher.publish("step-1" if rank == 0 else "step-1b")),
    }
    norm = model.model.norm
    weight = norm.weight
    if rank == 1:
        norm.extra = torch.nn.Parameter(torch.ones(3))
    said["new on one rank"] = caught(lambda: publisher.publish("step-2"))
    if rank == 1:
        del norm.extra
        del norm.weight
        norm.weight = torch.nn.Parameter(torch.ones(5))
    said["shape on one rank"] = caught(lambda: publisher.publish("step-2"))
    if rank == 1:
        norm.weight = torch.nn.Parameter(
            distribute_tensor(
                torch.ones(65, dtype=torch.float64), weight.device_mesh, [Shard(0)], src_data_rank=None
            )
        )
    said["dtype on one rank"] = caught(lambda: publisher.publish("step-2"))
    norm.weight = weight
    said["mended"] = caught(lambda: publisher.publish("step-2"))
    if rank == 0:
        publisher.close()
    said["closed on one rank"] = caught(lambda: publisher.publish("step-3"))
    publisher.close()
    said["closed"] = caught(lambda: publisher.publish("step-3"))
    report(said)


def init_errors() -> None:
    rank = dist.get_rank()
    said = {
        "no parameters": caught(lambda: Publisher(torch.nn.Module(), timeout=30)),
        "no tensor": caught(lambda: Publisher([("a", 3)], timeout=30)),  # type: ignore[list-item]
        "a dict": caught(lambda: Publisher({"a": torch.ones(2)}, timeout=30)),  # type: ignore[dict-item]
        "meta on one rank": caught(
            lambda: Publisher([("a", torch.ones(2, device="meta" if rank else "cpu"))], timeout=30)
        ),
        "shape differs": caught(lambda: Publisher([("a", torch.ones(2 + rank))], timeout=30)),
        "values differ": caught(lambda: Publisher([("a", torch.full((2,), float(rank)))], timeout=30)),
        "complex": caught(lambda: Publisher([("a", torch.ones(2, dtype=torch.complex64))], timeout=30)),
        "wire dtype": caught(lambda: Publisher([("a", torch.ones(2))], dtype={"a": torch.int64}, timeout=30)),
        "two of one name": caught(
            lambda: Publisher([("a", torch.ones(2)), ("a", torch.ones(2))], timeout=30)
        ),
        "port": caught(lambda: Publisher([("a", torch.ones(2))], port=70000, timeout=30)),
    }
    report(said)


def busy() -> None:
    """The pod's agent says that a round has taken the version up; then that it is over."""
    from weightsync_engine.protocol.messages import Problem
    from weightsync_engine.protocol.mover import MoverOutcome

    rank = dist.get_rank()
    publisher = Publisher([("a", torch.ones(8))], timeout=100)
    first = publisher.publish("v1")
    replaced = publisher.publish("v2")
    said: dict[str, Any] = {"replaced": [first.state, caught(lambda: first.wait(1))]}
    if rank == 0:  # rank 1 has not heard of it yet
        publisher._on_outcome(MoverOutcome(version="v2", committed=False, final=False))
    skipped = publisher.publish("v3")
    said["skipped"] = [skipped.state, caught(lambda: skipped.wait(1)), stamp(publisher)]
    said["travelling"] = [str(replaced.state), caught(lambda: replaced.wait(0.05))]
    publisher._timeout = 1.0
    said["wait in vain"] = caught(lambda: publisher.publish("v3", on_busy="wait"))
    publisher._timeout = 20.0
    if rank == 0:
        problem = Problem(reason="MoverLost", message="the mover of rank 2 (pod x) is gone", rank=2)
        publisher._on_outcome(MoverOutcome(version="v2", committed=False, problem=problem, final=False))
    said["failed once"] = caught(lambda: replaced.wait(0.05))
    given_up = publisher.publish("v3", on_busy="wait")
    problem = Problem(reason="NamesDiffer", message="pod vllm-0 lacks model.x", rank=None)
    publisher._on_outcome(MoverOutcome(version="v3", committed=False, problem=problem, final=True))
    said["given up"] = caught(lambda: given_up.wait(1))
    last = publisher.publish("v4")
    publisher._on_outcome(MoverOutcome(version="v4", committed=True))
    said["committed"] = [caught(lambda: last.wait(1)), str(last.state)]
    closing = publisher.publish("v5")
    publisher.close()
    said["closed"] = caught(lambda: closing.wait(1))
    report(said)


def absent() -> None:
    """Rank 1 does not come to publish."""
    publisher = Publisher([("a", torch.ones(8))], timeout=100)
    publisher._timeout = 2.0
    if dist.get_rank() == 1:
        wait_for_go()
        report({"absent": True})
    else:
        report([caught(lambda: publisher.publish("v1")), caught(lambda: publisher.publish("v2"))])
    wait_for_go()


def serve() -> None:
    """Publishes whatever it is told, until it is told to stop."""
    model = qwen(param_dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    publisher = Publisher(model, timeout=60)
    assert publisher._mover is not None
    report(
        {
            "port": publisher.port,
            "run_dir": str(publisher._mover.socket_path.parent),
            "mover": publisher._mover.pid,
            "agent": publisher._agent.pid if publisher._agent else None,
            "shapes": {h.name: list(h.tensor.shape) for h in publisher._sources.held()},
        }
    )
    handles = {}
    while (line := wait_for_go()) and line != "stop":
        verb, _, version = line.partition(" ")
        if verb == "publish":
            train(model, optimizer)
            handles[version] = publisher.publish(version)
            full = {h.name: h.tensor.full_tensor() for h in publisher._sources.held()}
            report({name: bits(tensor.to(torch.bfloat16)) for name, tensor in full.items()})
        elif verb == "wait":
            report(caught(lambda v=version: handles[v].wait(30)))  # type: ignore[misc]
        elif verb == "train":
            train(model, optimizer)
            report({"trained": True})
    publisher.close()
    report({"closed": True})


def leave_without_close() -> None:
    publisher = Publisher([("a", torch.ones(8))], timeout=60)
    publisher.publish("v1")
    assert publisher._mover is not None
    agent = publisher._agent.pid if publisher._agent else None
    report(
        {"run_dir": str(publisher._mover.socket_path.parent), "mover": publisher._mover.pid, "agent": agent}
    )


def main() -> None:
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    report("up")
    while case := wait_for_go():
        try:
            globals()[case]()
        except BaseException as e:
            traceback.print_exc()
            report({"crash": f"{type(e).__name__}: {e}"})
            raise
        if case in ("absent", "leave_without_close"):
            return
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
