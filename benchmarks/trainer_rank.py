"""One rank of a trainer of the benchmark: an FSDP2 model whose weights are told to change, and a Publisher; vLLM's own
trainer engine over the same model beside it. One line of JSON in, one out."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import Qwen3Config, Qwen3ForCausalLM

from weightsync_engine import Publisher

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8,
             "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 1000, "tie_word_embeddings": False},
    "qwen3-1.7b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
                   "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
                   "tie_word_embeddings": True},
    "qwen3-8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
                 "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
                 "tie_word_embeddings": False},
}  # fmt: skip


class Rank:
    def __init__(self, options: argparse.Namespace) -> None:
        self.rank, self.world = options.rank, options.trainers
        if options.gpus:
            self.device = torch.device("cuda", self.rank % options.gpus)
            torch.cuda.set_device(self.device)
            dist.init_process_group("cpu:gloo,cuda:nccl", rank=self.rank, world_size=self.world)
            self.synchronize: Any = torch.cuda.synchronize
            torch.set_default_dtype(torch.bfloat16)
        else:  # to rehearse
            self.device = torch.device("cpu")
            dist.init_process_group("gloo", rank=self.rank, world_size=self.world)
            self.synchronize = int  # nothing to wait for
        self.config = Qwen3Config(
            **PRESETS[options.model], max_position_embeddings=4096, dtype=torch.get_default_dtype(),
            bos_token_id=None, eos_token_id=None, pad_token_id=None,
        )  # fmt: skip
        self.config.architectures = ["Qwen3ForCausalLM"]
        torch.manual_seed(0)
        with self.device:
            self.model = Qwen3ForCausalLM(self.config)
        if self.rank == 0:
            self.model.save_pretrained(Path(options.out, "model"))
        if self.world > 1:
            mesh = init_device_mesh(self.device.type, (self.world,))
            for layer in self.model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self._base = [_local(p).detach().clone() for p in self.model.parameters()]
        self._publisher = Publisher(self.model, port=options.port)
        self._peer: Any = None
        self._peer_url = ""
        self._contract: Any = None

    @torch.no_grad()
    def scale(self, by: float) -> None:
        for p, b in zip(self.model.parameters(), self._base, strict=True):
            torch.mul(b, by, out=_local(p))
        self.synchronize()

    def publish(self, version: str, scale: float) -> dict[str, Any]:
        self.scale(scale)
        start = time.perf_counter()
        self._publisher.publish(version, on_busy="wait")
        host = time.perf_counter()
        self.synchronize()
        return {
            "published_at": host, "host_ms": (host - start) * 1e3, "device_ms": (time.perf_counter() - start) * 1e3
        }  # fmt: skip

    def save(self, folder: str) -> dict[str, Any]:
        """What is published last, as a checkpoint."""
        full = {
            n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in self.model.named_parameters()
        }
        if self.rank == 0:
            with self.device:
                whole = Qwen3ForCausalLM(self.config)
            whole.load_state_dict(full, strict=False)
            whole.tie_weights()
            whole.save_pretrained(folder)
        return {}

    def peer_init(self, url: str, port: int) -> dict[str, Any]:
        """vLLM's own `nccl_m2n` backend, over vLLM's own client and trainer engine, to a server of one worker."""
        from vllm.distributed.weight_transfer import ModuleSource, WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
        from vllm.distributed.weight_transfer.m2n_trainer import M2NTrainerInitInfo

        self._peer_url = url
        start = time.perf_counter()
        self._peer = WeightTransferTrainerFactory.trainer_init(
            M2NTrainerInitInfo(
                rank=self.rank, master_address="127.0.0.1", master_port=port, world_size=self.world + 1,
                num_trainer_ranks=self.world,
            ),
            client=HTTPVLLMWeightSyncClient(url), source=ModuleSource(self.model),
        )  # fmt: skip
        return {"seconds": time.perf_counter() - start}

    def peer_round(self, scale: float) -> dict[str, Any]:
        """Pause, send, resume, as vLLM's own examples do."""
        self.scale(scale)
        dist.barrier()
        start = time.perf_counter()
        self._tell_peer("pause?mode=keep")
        self._peer.send_weights()
        self.synchronize()
        self._tell_peer("resume")
        return {"ms": (time.perf_counter() - start) * 1e3}

    def contract_init(self, urls: list[str], where: dict[str, Any]) -> dict[str, Any]:
        """Our backend by name through vLLM's own trainer contract, to servers of one worker each."""
        from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        from weightsync_engine.trainer.contract import ModelSource, Servers, TrainerInit

        if self._contract is not None:
            self._contract.shutdown()
        start = time.perf_counter()
        self._contract = WeightTransferTrainerFactory.trainer_init(
            TrainerInit(
                rank=self.rank, num_trainer_ranks=self.world, world_size=self.world + len(urls),
                deadline_seconds=60, names_per_update=50, **where,
            ),
            client=Servers([HTTPVLLMWeightSyncClient(url) for url in urls], [1] * len(urls)),
            source=ModelSource(self.model),
        )  # fmt: skip
        return {"seconds": time.perf_counter() - start}

    def contract_send(self, version: str, scale: float) -> dict[str, Any]:
        self.scale(scale)
        dist.barrier()
        start = time.perf_counter()
        self._contract.send_weights(version)
        return {"ms": (time.perf_counter() - start) * 1e3}

    def _tell_peer(self, verb: str) -> None:
        if self.rank == 0:
            httpx.post(f"{self._peer_url}/{verb}", timeout=60, trust_env=False).raise_for_status()


def _local(parameter: Any) -> Any:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter.data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("rank", "trainers", "gpus", "port"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--model", choices=list(PRESETS), required=True)
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    rank = Rank(options)
    print("{}", file=out, flush=True)
    for line in sys.stdin:
        ask = json.loads(line)
        told = getattr(rank, ask.pop("do"))(**ask)
        print(json.dumps(told), file=out, flush=True)


if __name__ == "__main__":
    main()
