"""Rounds from a real FSDP2 trainer into real vLLM servers on the GPUs of this host, while they decode.

    python -m benchmarks.gpu_vllm --model qwen3-1.7b --trainers 1 --servers 1 --rounds 20

Processes without a cluster: trainer ranks with a Publisher each, vLLM servers with our backend, and this process, which
tells the agents what the operator tells them, by the same requests and long polls. Streams run all the time, but in the
first `--idle-rounds`. The last version is the weights that the servers loaded, so they must give the greedy tokens of
the start again; and a fresh server that loads what the trainer saves must give the same. Prints each round's parts in
milliseconds, the longest gap between two tokens around the flip, and GPU memory by round.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import secrets
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from tests.integration.vllm.serving import OBJECT, Operator, VllmProcess, completion, free_port

from weightsync_engine.protocol.messages import AgentState, EpochPhase, RoundPhase
from weightsync_engine.protocol.names import (
    ENV_JWKS,
    ENV_NAMESPACE,
    ENV_POD_IP,
    ENV_POD_NAME,
    ROUTE_STATE,
)

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
PROMPT = list(range(100, 140))
SECONDS = 60.0


# ---- trainer rank ------------------------------------------------------------------------------------------


def trainer(options: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from weightsync_engine import Publisher

    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(**what: Any) -> None:
        print(json.dumps(what), file=out, flush=True)

    rank, world = options.rank, options.trainers
    if options.gpus:
        device = torch.device("cuda", rank % options.gpus)
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", rank=rank, world_size=world)
        synchronize = torch.cuda.synchronize
        torch.set_default_dtype(torch.bfloat16)
    else:  # to rehearse
        device = torch.device("cpu")
        dist.init_process_group("gloo", rank=rank, world_size=world)
        synchronize = int  # nothing to wait for
    config = Qwen3Config(
        **PRESETS[options.model], max_position_embeddings=4096, dtype=torch.get_default_dtype(),
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    config.architectures = ["Qwen3ForCausalLM"]
    torch.manual_seed(0)
    with device:
        model = Qwen3ForCausalLM(config)
    folder = Path(options.out, "model")
    if rank == 0:
        model.save_pretrained(folder)
    if world > 1:
        mesh = init_device_mesh(device.type, (world,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)

    def local(p: Any) -> Any:
        return p.to_local() if hasattr(p, "to_local") else p.data

    base = [local(p).detach().clone() for p in model.parameters()]
    publisher = Publisher(model, port=options.port)
    say(ready=True)
    for line in sys.stdin:
        ask = json.loads(line)
        if "publish" in ask:
            with torch.no_grad():
                for p, b in zip(model.parameters(), base, strict=True):
                    torch.mul(b, ask["scale"], out=local(p))
            synchronize()
            start = time.perf_counter()
            publisher.publish(ask["publish"])
            host = time.perf_counter() - start
            synchronize()
            say(published=ask["publish"], host_ms=host * 1e3, device_ms=(time.perf_counter() - start) * 1e3)
        else:
            full = {
                n: (p.full_tensor() if hasattr(p, "full_tensor") else p) for n, p in model.named_parameters()
            }
            if rank == 0:
                with device:
                    whole = Qwen3ForCausalLM(config)
                whole.load_state_dict(full, strict=False)
                whole.tie_weights()
                whole.save_pretrained(ask["save"])
                del whole
            say(saved=True)


class Trainers:
    """All ranks of one trainer pod."""

    def __init__(self, options: argparse.Namespace, operator: Operator) -> None:
        self.port, meet = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = Path(options.out, "trainer.log")
        environment = {
            **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(meet), "NCCL_MULTI_RANK_GPU_ENABLE": "1",
            ENV_JWKS: str(operator.jwks), ENV_NAMESPACE: "rl", ENV_POD_IP: "127.0.0.1", ENV_POD_NAME: "trainer",
        }  # fmt: skip
        command = [sys.executable, "-m", "benchmarks.gpu_vllm", *sys.argv[1:], "--port", str(self.port)]
        with self.log.open("ab") as log:
            self.ranks = [
                subprocess.Popen(
                    [*command, "--rank", str(r)],
                    env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                )
                for r in range(options.trainers)
            ]  # fmt: skip

    def ask(self, seconds: float = 300, **what: Any) -> list[dict[str, Any]]:
        for p in self.ranks:
            assert p.stdin is not None
            p.stdin.write(json.dumps(what).encode() + b"\n")
            p.stdin.flush()
        return self.hear(seconds)

    def hear(self, seconds: float = 300) -> list[dict[str, Any]]:
        timer = threading.Timer(seconds, self.close)
        timer.start()
        try:
            lines = [p.stdout.readline() for p in self.ranks]  # type: ignore[union-attr]
        finally:
            timer.cancel()
        if not all(lines):
            raise RuntimeError(f"a trainer rank ended:\n{tail(self.log)}")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        for p in self.ranks:
            p.kill()


def tail(log: Path, lines: int = 40) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


# ---- what the operator does --------------------------------------------------------------------------------


class Driver:
    """One epoch of a trainer and servers, and rounds in it, by the operator's requests and long polls."""

    def __init__(
        self, operator: Operator, trainer: str, servers: list[str], trainers: int, transport: str
    ) -> None:
        self.operator, self.trainers, self.transport = operator, trainers, transport
        self.urls = [trainer, *servers]
        self.pool = ThreadPoolExecutor(len(self.urls))
        self.client = httpx.Client(trust_env=False, timeout=SECONDS)
        self.headers = operator.headers()
        self.boots: dict[str, str] = {}
        self.epoch, self.round = 0, 0

    def state(self, url: str, seen: int | None = None) -> AgentState:
        query = f"?seen={seen}&wait=10" if seen is not None else ""
        answer = self.client.get(url + ROUTE_STATE + query, headers=self.headers)
        assert answer.status_code == 200, answer.text
        return AgentState.model_validate_json(answer.content)

    def post(self, url: str, verb: str, **body: Any) -> None:
        message = {"boot_id": self.boots[url], "object_uid": OBJECT, "term": 1} | body
        answer = self.client.post(f"{url}/weightsync/v1/{verb}", json=message, headers=self.headers)
        assert answer.status_code == 200, f"{url} {verb}: {answer.status_code} {answer.text}"

    def every(self, do: Any) -> list[Any]:
        return list(self.pool.map(do, self.urls))

    def until(self, holds: Any) -> list[AgentState]:
        def one(url: str) -> AgentState:
            until, state = time.monotonic() + SECONDS, self.state(url)
            while not holds(state):
                if time.monotonic() > until:
                    raise AssertionError(f"{url} did not get there: {state}")
                state = self.state(url, state.revision)
            return state

        return self.every(one)

    def join(self) -> float:
        start = time.perf_counter()
        self.headers = self.operator.headers()
        states = dict(zip(self.urls, self.every(self.state), strict=True))
        self.boots = {url: s.boot_id for url, s in states.items()}
        self.epoch += 1
        workers = [s.inference.workers for s in states.values() if s.inference is not None]
        lead = self.urls[0]
        host, port = lead.removeprefix("http://").split(":")
        common = {
            "epoch": self.epoch, "world_size": self.trainers + sum(workers), "trainer_ranks": self.trainers,
            "key": secrets.token_hex(32), "lead_agent": {"host": host, "port": int(port)},
            "deadline_seconds": SECONDS, "transport": self.transport,
        }  # fmt: skip
        self.post(lead, "join", first_rank=0, **common)
        while (state := self.state(lead)).epoch is None or state.epoch.rendezvous is None:
            time.sleep(0.005)
        rank = self.trainers
        for url, count in zip(self.urls[1:], workers, strict=True):
            self.post(url, "join", first_rank=rank, rendezvous=state.epoch.rendezvous.model_dump(), **common)
            rank += count
        joined = self.until(
            lambda s: (
                s.epoch is not None and s.epoch.epoch == self.epoch and s.epoch.phase != EpochPhase.JOINING
            )
        )
        for s in joined:
            assert s.epoch is not None and s.epoch.phase == EpochPhase.JOINED, s
        return time.perf_counter() - start

    def phase(self, verb: str, wanted: RoundPhase, **body: Any) -> float:
        start = time.perf_counter()
        self.every(lambda url: self.post(url, verb, epoch=self.epoch, round=self.round, **body))

        def settled(s: AgentState) -> bool:
            r = s.round
            return r is not None and r.round == self.round and (r.phase == wanted or r.problem is not None)

        for s in self.until(settled):
            assert s.round is not None and s.round.phase == wanted, s.round
        return (time.perf_counter() - start) * 1e3

    def sync(self, version: str) -> dict[str, float]:
        self.round += 1
        start = time.perf_counter()
        parts = {
            "prepare": self.phase(
                "prepare", RoundPhase.READY, version=version, deadline_seconds=SECONDS, decide_by_seconds=600
            ),
            "transfer": self.phase("transfer", RoundPhase.VERIFIED, deadline_seconds=SECONDS),
            "commit": self.phase("commit", RoundPhase.COMMITTED, version=version, deadline_seconds=SECONDS),
        }
        return {**parts, "round": (time.perf_counter() - start) * 1e3}

    def admit(self, version: str | None) -> None:
        for url in self.urls[1:]:
            self.post(url, "admit", version=version)


class Stream(threading.Thread):
    """Streams completions one after the other, and notes when each token came."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.url, self.stop, self.error = url, False, ""
        self.times: list[float] = []

    def run(self) -> None:
        body = completion(PROMPT, 400) | {"stream": True}
        try:
            while not self.stop:
                with httpx.stream(
                    "POST", self.url + "/v1/completions", json=body, timeout=120, trust_env=False
                ) as answer:
                    if answer.status_code != 200:
                        self.error = f"{answer.status_code} {answer.read()!r}"
                        return
                    for line in answer.iter_lines():
                        if line.startswith("data: {"):
                            self.times.append(time.perf_counter())
                        if self.stop:
                            return
        except Exception as e:
            self.error = f"{type(e).__name__}: {e}"

    def gaps(self, start: float, end: float) -> list[float]:
        """Milliseconds between tokens, of those that end in a span."""
        times = [t for t in list(self.times) if start - 1 <= t <= end]
        return [(b - a) * 1e3 for a, b in itertools.pairwise(times) if b >= start]


def memory_used() -> list[int]:
    """MiB by GPU."""
    if not shutil.which("nvidia-smi"):
        return []
    told = subprocess.run(
        ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
    )
    return [int(line) for line in told.stdout.split()]


def server(
    options: argparse.Namespace, operator: Operator, model: Path, name: str, spec: str, gpu: int
) -> Any:
    tp = int(spec.removeprefix("tp"))
    environment = {k: v for k, v in os.environ.items() if k.startswith("VLLM_")}
    if tp == 1 and options.gpus:
        environment["CUDA_VISIBLE_DEVICES"] = str(gpu)
    process = VllmProcess(
        model, Path(options.out, name), operator, tp=tp, live_weights=not options.gpus,
        environment=environment, arguments=(
            *("--dtype", "bfloat16", "--kv-cache-memory-bytes", str(1 << 30), "--gpu-memory-utilization", "0.3",
              "--max-model-len", "2048") * bool(options.gpus), *options.vllm_arguments.split(),
        ),
    )  # fmt: skip
    return process.start()


def medians(rounds: list[dict[str, Any]]) -> dict[str, float]:
    keys = (
        "prepare",
        "transfer",
        "commit",
        "round",
        "publish_host",
        "publish_device",
        "longest_gap",
        "usual_gap",
    )
    return {k: round(statistics.median(r[k] for r in rounds), 2) for k in keys if rounds}


def drive(options: argparse.Namespace) -> None:
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    operator = Operator(out)
    trainers = Trainers(options, operator)
    servers: list[Any] = []
    result: dict[str, Any] = {"options": vars(options), "rounds": []}
    try:
        trainers.hear()
        for i, spec in enumerate(options.servers.split(",")):
            servers.append(
                server(options, operator, out / "model", f"server-{i}", spec, i % max(options.gpus, 1))
            )
        for s in servers:
            s.wait_up()
        print("servers are up", flush=True)
        driver = Driver(operator, trainers.url, [s.url for s in servers], options.trainers, options.transport)
        result["join_s"] = driver.join()
        driver.admit(None)
        first = [s.greedy(PROMPT, 16) for s in servers]
        streams = [Stream(s.url) for s in servers for _ in range(options.streams)]
        for turn in range(1, options.rounds + 1):
            if turn == options.idle_rounds + 1:
                for s in streams:
                    s.start()
                time.sleep(3)
            version = f"step-{turn}"
            # The last version is the one that the servers loaded: they must say again what they said first.
            scale = 1.0 if turn == options.rounds else 1 + turn / 64
            told = trainers.ask(publish=version, scale=scale)
            start = time.perf_counter()
            parts = driver.sync(version)
            end = time.perf_counter()
            driver.admit(version)
            if turn == options.rounds - 1:
                changed = [s.greedy(PROMPT, 16) for s in servers]
            time.sleep(0.5 if turn > options.idle_rounds else 0.05)
            gaps = [g for s in streams for g in s.gaps(start, end + 0.2)]
            quiet = [g for s in streams for g in s.gaps(end + 0.2, end + 0.5)]
            parts |= {
                "publish_host": max(t["host_ms"] for t in told),
                "publish_device": max(t["device_ms"] for t in told),
                "longest_gap": max(gaps, default=0.0),
                "usual_gap": statistics.median(quiet) if quiet else 0.0,
                "memory_mib": memory_used(),
            }
            result["rounds"].append(parts)
            print(
                json.dumps({k: round(v, 1) if isinstance(v, float) else v for k, v in parts.items()}),
                flush=True,
            )
        for s in streams:
            s.stop = True
        result["stream_errors"] = [s.error for s in streams if s.error]
        last = [s.greedy(PROMPT, 16) for s in servers]
        result["tokens"] = {"loaded": first, "changed": changed, "loaded again": last, "equal": last == first}
        print(json.dumps(result["tokens"]), flush=True)
        idle = result["rounds"][2 : options.idle_rounds]
        if idle:
            result["idle_medians_ms"] = medians(idle)
            print(json.dumps({"idle_medians_ms": result["idle_medians_ms"]}), flush=True)
        result["medians_ms"] = medians(result["rounds"][max(options.idle_rounds, 2) :])
        print(json.dumps({"medians_ms": result["medians_ms"], "join_s": result["join_s"]}), flush=True)
        if not options.fresh:
            return
        trainers.ask(save=str(out / "final"))
        fresh = server(options, operator, out / "final", "fresh", "tp1", 0)
        servers.append(fresh)
        fresh.wait_up()
        boot = operator.state(fresh.url).boot_id
        operator.post(fresh.url, "admit", boot, version=None)
        wanted = fresh.greedy(PROMPT, 16)
        result["tokens"] = {
            "first": first,
            "last": last,
            "fresh": wanted,
            "equal": [t == wanted for t in last],
        }
        print(json.dumps(result["tokens"]))
    except BaseException:
        for s in servers:
            print(f"--- {s.log}\n{s.tail(30)}", file=sys.stderr)
        print(f"--- trainer\n{tail(trainers.log)}", file=sys.stderr)
        raise
    finally:
        (out / "result.json").write_text(json.dumps(result, default=str))
        for s in servers:
            s.kill()
        trainers.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=list(PRESETS), default="qwen3-1.7b")
    parser.add_argument("--trainers", type=int, default=1)
    parser.add_argument("--servers", default="tp1", help="such as tp1 or tp2,tp1")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--streams", type=int, default=8, help="by server")
    parser.add_argument("--idle-rounds", type=int, default=0, help="the first so many without streams")
    parser.add_argument(
        "--no-fresh", dest="fresh", action="store_false", help="skip the fresh server at the end"
    )
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--out", default="build/gpu_vllm")
    parser.add_argument("--vllm-arguments", default="")
    parser.add_argument("--limit", type=int, default=400, help="seconds for all")
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank >= 0:
        trainer(options)
        return
    signal.signal(signal.SIGALRM, lambda *_: sys.exit(f"not done within {options.limit} s"))
    signal.alarm(options.limit)
    drive(options)


if __name__ == "__main__":
    main()
