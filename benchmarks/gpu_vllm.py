"""Rounds from a real FSDP2 trainer into real vLLM servers on the GPUs of this host, while they decode.

    python -m benchmarks.gpu_vllm --model qwen3-1.7b --trainers 2 --servers tp1 --peer

Processes without a cluster: trainer ranks with a Publisher each, vLLM servers with our backend, and the operator's own
reconciler over an object that is kept here. Ranks take the GPUs from the first on, servers from the last. In order:
rounds with idle servers; the same trainer and a server like the first by vLLM's own `nccl_m2n` backend (`--peer`);
rounds while streams decode (`--streams`), with what running requests have computed thrown away at the flip, and kept;
faults (`--faults`). The last version is the weights that the servers loaded, so they must give the greedy tokens of the
start again; and a fresh server that loads what the trainer saves must give the same (`--fresh`). Prints what was
measured; `result.json` has all of it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
from tests.integration.vllm.serving import Operator, VllmProcess, command_line, descendants, free_port

from benchmarks import decoding
from benchmarks.control import NAMESPACE, Control
from benchmarks.trainer_rank import PRESETS
from weightsync_engine.protocol.names import (
    ENV_JWKS,
    ENV_NAMESPACE,
    ENV_POD_IP,
    ENV_POD_NAME,
    ENV_POD_UID,
    ENV_PORT,
)
from weightsync_engine.trainer.contract import unique_id

PROMPT = decoding.PROMPT
SECONDS = 60.0
TRANSFER_SECONDS = 15
"""The round's own deadline; a peer that does nothing for a third of it is given up. The first steps of new processes
that share a GPU can take seconds."""
SPEC = {
    "trigger": {"type": "OnPublish"},
    "deadlines": {"joinSeconds": 60, "prepareSeconds": 20, "transferSeconds": TRANSFER_SECONDS, "commitSeconds": 20},
    "retry": {"backoffSeconds": 1, "maxBackoffSeconds": 1},
}  # fmt: skip


class Trainers:
    """All ranks of one trainer pod."""

    def __init__(self, options: argparse.Namespace, operator: Operator, control: Control) -> None:
        self.port, meet = free_port(), free_port()
        self.log = Path(options.out, "trainer.log")
        control.add("trainer", "trainer", self.port)
        environment = {
            **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(meet), "NCCL_MULTI_RANK_GPU_ENABLE": "1",
            ENV_JWKS: str(operator.jwks), ENV_NAMESPACE: NAMESPACE, ENV_POD_IP: "127.0.0.1", ENV_POD_NAME: "trainer",
            ENV_POD_UID: control.uid("trainer"),
        }  # fmt: skip
        command = [
            *(
                sys.executable,
                "-m",
                "benchmarks.trainer_rank",
                "--model",
                options.model,
                "--out",
                options.out,
            ),
            *("--trainers", str(options.trainers), "--gpus", str(options.gpus), "--port", str(self.port)),
        ]
        with self.log.open("ab") as log:
            self.ranks = [
                subprocess.Popen(
                    [*command, "--rank", str(r)],
                    env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                )
                for r in range(options.trainers)
            ]  # fmt: skip

    def ask(self, do: str, seconds: float = 300, **what: Any) -> list[dict[str, Any]]:
        for p in self.ranks:
            assert p.stdin is not None
            p.stdin.write(json.dumps({"do": do, **what}).encode() + b"\n")
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

    def movers(self) -> list[int]:
        """Of each rank the mover that takes part, in rank order."""
        return [movers_below(p.pid)[0] for p in self.ranks]

    def close(self) -> None:
        for p in self.ranks:
            p.kill()


def movers_below(pid: int) -> list[int]:
    """Movers that take part; a spare has not been given a slab yet."""
    found = [p for p in descendants(pid) if b"weightsync_engine.mover" in command_line(p)]
    named = [p for p in found if Path(f"/proc/{p}/comm").read_text().startswith("ws-mover")]
    return named or found


def tail(log: Path, lines: int = 40) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


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


def middle(rounds: list[dict[str, Any]]) -> dict[str, float]:
    """Medians of what every one of them has."""
    keys = [k for k in rounds[0] if all(isinstance(r.get(k), float) for r in rounds)] if rounds else []
    return {k: round(statistics.median(r[k] for r in rounds), 2) for k in keys}


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.out = Path(options.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.operator = Operator(self.out)
        self.servers: dict[str, VllmProcess] = {}
        self.turn = 0
        self.result: dict[str, Any] = {"options": vars(options), "date": time.strftime("%Y-%m-%d")}

    def server(
        self,
        name: str,
        spec: str,
        model: Path,
        *,
        at: int = 0,
        backend: str = "weightsync",
        alone: bool = False,
    ) -> VllmProcess:
        """Start one such as `tp2`. One that is `alone` has vLLM's own routes, no agent, and no operator sees it."""
        options, tp = self.options, int(spec.removeprefix("tp"))
        environment: dict[str, str | None] = {k: v for k, v in os.environ.items() if k.startswith("VLLM_")}
        if tp == 1 and options.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = str(options.gpus - 1 - at % options.gpus)
        if alone:
            environment |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_PLUGINS": None}
        server = VllmProcess(
            model, self.out / name, self.operator, tp=tp, live_weights=not options.gpus,
            backend=backend, environment=environment,
            arguments=(
                *("--dtype", "bfloat16", "--kv-cache-memory-bytes", str(1 << 30), "--gpu-memory-utilization", "0.2",
                  "--max-model-len", "2048") * bool(options.gpus), *options.vllm_arguments.split(),
            ),
        )  # fmt: skip
        if not alone:
            self.control.add(name, "inference", server.port)
            server._environment[ENV_POD_UID] = self.control.uid(name)
            server._environment[ENV_PORT] = str(server.port)
        self.servers[name] = server
        return server.start()

    @property
    def ours(self) -> list[VllmProcess]:
        return [s for n, s in self.servers.items() if n.startswith(("server", "fresh"))]

    def run(self) -> None:
        options = self.options
        self.spec = SPEC | {"transport": options.transport}
        with Control(self.operator.token, self.spec) as self.control:
            self.trainers = Trainers(options, self.operator, self.control)
            try:
                self.trainers.hear()
                for i, spec in enumerate(options.servers.split(",")):
                    self.server(f"server-{i}", spec, self.out / "model", at=i)
                if options.peer:
                    self.server("peer", "tp1", self.out / "model", backend="nccl_m2n", alone=True)
                for i in range(2 * options.contract):
                    self.server(f"alone-{i}", "tp1", self.out / "model", alone=True)
                self.until_served()
                self.measure()
            except BaseException:
                for s in self.servers.values():
                    print(f"--- {s.log}\n{s.tail(30)}", file=sys.stderr)
                print(f"--- trainer\n{tail(self.trainers.log)}", file=sys.stderr)
                raise
            finally:
                (self.out / "result.json").write_text(json.dumps(self.result, default=str))
                for s in self.servers.values():
                    s.kill()
                self.trainers.close()

    def until_served(self) -> None:
        for s in self.servers.values():
            s.wait_up()
        wanted = f"{len(self.ours)}/{len(self.ours)}"
        self.control.wait(
            lambda status: status.get("inference", "") == wanted, SECONDS, f"{wanted} servers are members"
        )
        self.control.wait_true("RendezvousEstablished", SECONDS)
        print("servers are up", flush=True)

    def measure(self) -> None:
        options, result = self.options, self.result
        first = self.say()
        result["idle"] = [self.round() for _ in range(options.idle_rounds)]
        self.tell("idle", result["idle"][2:])
        if options.peer:
            result["peer"] = self.peer()
            ratio = middle(result["idle"][2:])["whole"] / result["peer"]["median_ms"]
            result["to_peer"] = round(ratio, 3)
            print(json.dumps({"peer": result["peer"], "ours to the peer's": result["to_peer"]}), flush=True)
        if options.streams:
            with self.decoding() as of:
                for cache in ("Reset", "Kept"):
                    self.control.apply(self.spec | {"flip": {"prefixCache": cache}})
                    result[f"decoding, {cache}"] = [self.round(0.4) for _ in range(options.rounds)]
            self.control.apply(self.spec)
            for cache in ("Reset", "Kept"):
                for r in result[f"decoding, {cache}"]:
                    r |= of(r["began"], r["ended"] + 0.2)
                self.tell(f"decoding, {cache}", result[f"decoding, {cache}"][2:])
        self.round()
        changed = self.say()
        if options.contract:
            result["contract"] = self.contract()
            print(json.dumps({"contract": result["contract"]}), flush=True)
        if options.faults:
            result["faults"] = self.faults()
        kinds = [k for k in ("idle", "decoding, Reset", "decoding, Kept") if k in result]
        result["memory"] = {k: [r["memory_mib"] for r in result[k]] for k in kinds}
        self.round(scale=1.0)
        last = self.say()
        result["tokens"] = {"loaded": first, "changed": changed, "loaded again": last}
        result["tokens"]["equal"] = all(first[name] == tokens for name, tokens in last.items())
        if options.fresh:
            self.round(scale=1.25)
            self.trainers.ask("save", folder=str(self.out / "final"))
            now = self.say()
            like, spec = next((n, s) for n, s in zip(now, options.servers.split(","), strict=False))
            fresh = self.server("fresh", spec, self.out / "final").wait_up()
            self.until_served()
            result["tokens"] |= {"last": now, "fresh": (wanted := fresh.greedy(PROMPT, 16))}
            # Another tensor parallel size adds up in another order, so only its like must say the same.
            result["tokens"]["fresh equal"] = now[like] == wanted
        print(json.dumps({k: v for k, v in result["tokens"].items() if "equal" in k}), flush=True)

    def say(self) -> dict[str, list[int]]:
        """Greedy tokens of each server."""
        return {n: s.greedy(PROMPT, 16) for n, s in self.servers.items() if s in self.ours}

    def tell(self, what: str, rounds: list[dict[str, Any]]) -> None:
        self.result[f"{what}_medians"] = middle(rounds)
        print(json.dumps({what: self.result[f"{what}_medians"], "rounds": len(rounds)}), flush=True)

    def round(self, rest: float = 0.05, scale: float | None = None) -> dict[str, Any]:
        """One version, published, moved and committed; milliseconds, and when it began and ended."""
        self.turn += 1
        version = f"step-{self.turn}"
        scale = 1 + self.turn % 30 / 64 if scale is None else scale
        told = self.trainers.ask("publish", version=version, scale=scale)
        published = max(t["published_at"] for t in told)
        ended = self.control.wait_committed(version, SECONDS)
        time.sleep(rest)
        stop = max(t["host_ms"] for t in told)
        return {
            "began": published - stop / 1e3,
            "ended": ended,
            "publish_host": stop,
            "publish_device": max(t["device_ms"] for t in told),
            "round": (ended - published) * 1e3,
            "whole": (ended - published) * 1e3 + stop,
            "memory_mib": memory_used(),
        }

    def peer(self) -> dict[str, Any]:
        init = self.trainers.ask("peer_init", url=self.servers["peer"].url, port=free_port())
        rounds = [
            max(t["ms"] for t in self.trainers.ask("peer_round", scale=1 + i / 64))
            for i in range(self.options.idle_rounds)
        ]
        return {
            "init_s": round(max(t["seconds"] for t in init), 3),
            "rounds_ms": [round(ms, 2) for ms in rounds],
            "median_ms": round(statistics.median(rounds[2:]), 2),
        }

    def contract(self) -> dict[str, Any]:
        """Two servers without agents by vLLM's trainer contract, by address and by unique id; they must say what ours
        say with the same weights."""
        servers = [s for n, s in self.servers.items() if n.startswith("alone")]
        found: dict[str, Any] = {}
        for way, where in (
            ("address", {"master_address": "127.0.0.1", "master_port": free_port()}),
            ("unique_id", {"unique_id": unique_id("127.0.0.1")}),
        ):
            told = self.trainers.ask("contract_init", urls=[s.url for s in servers], where=where)
            sent, right = [], []
            for i in range(1, 5):
                scale = 1 + i / 8
                sent.append(
                    max(
                        t["ms"] for t in self.trainers.ask("contract_send", version=f"{way}-{i}", scale=scale)
                    )
                )
                for s in servers:
                    httpx.post(s.url + "/reset_prefix_cache", trust_env=False, timeout=30)
            self.round(scale=scale)
            wanted = self.ours[0].greedy(PROMPT, 16)
            right = [s.greedy(PROMPT, 16) == wanted for s in servers]
            found[way] = {
                "init_s": round(max(t["seconds"] for t in told), 2), "send_ms": [round(ms, 1) for ms in sent],
                "tokens equal": right,
            }  # fmt: skip
        return found

    @contextlib.contextmanager
    def decoding(self) -> Iterator[Callable[[float, float], dict[str, float]]]:
        """Streams run inside; afterwards what they saw of a span of time can be asked."""
        times = self.out / "decoding.json"
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.decoding", str(times), *(s.url for s in self.ours),
             "--streams", str(self.options.streams)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        streams: list[dict[str, Any]] = []
        try:
            assert process.stdout is not None and process.stdin is not None
            assert process.stdout.readline(), "no stream began"
            time.sleep(2)
            yield lambda start, end: decoding.gaps(streams, start, end)
            process.stdin.close()
            process.wait(30)
            streams += json.loads(times.read_text())
            self.result["stream_errors"] = [s["error"] for s in streams if s["error"]]
            self.result["tokens_streamed"] = sum(len(s["times"]) for s in streams)
        finally:
            process.kill()

    # -- faults ----------------------------------------------------------------------------------------------

    def faults(self) -> dict[str, float]:
        """Seconds from the fault to the next version in every server that is left."""
        found = {}
        victims = {
            "a trainer's mover, killed in a transfer": lambda: self.trainers.movers()[-1],
            "a server's mover, killed in a transfer": lambda: movers_below(self._process(0))[0],
        }
        for what, pid in victims.items():
            found[what] = self.fault(what, pid(), signal.SIGKILL)
            found[what.replace("killed", "frozen")] = self.fault(what, pid(), None)
        if len(self.ours) > 1:
            found["a whole server, killed in a transfer"] = self.server_fault()
        self.result["faults_deadline_s"] = TRANSFER_SECONDS
        return found

    def _process(self, number: int) -> int:
        process = self.ours[number].process
        assert process is not None
        return process.pid

    def fault(self, what: str, pid: int, then: signal.Signals | None) -> float:
        """Stop a process, publish, let the transfer begin, and then kill it or leave it as it is."""
        os.kill(pid, signal.SIGSTOP)
        version = self._publish()
        time.sleep(0.5)
        began = time.perf_counter()
        if then is not None:
            os.kill(pid, then)
        took = self.control.wait_committed(version, SECONDS) - began
        print(
            f"{what if then else what.replace('killed', 'frozen')}: good again after {took:.2f} s", flush=True
        )
        return round(took, 3)

    def server_fault(self) -> float:
        """The last server is gone whole, in a transfer that its mover holds up; its pod goes, as a kubelet tells."""
        name, server = [(n, s) for n, s in self.servers.items() if s in self.ours][-1]
        assert name.startswith("server") and server.process is not None
        os.kill(movers_below(server.process.pid)[0], signal.SIGSTOP)
        version = self._publish()
        time.sleep(0.5)
        began = time.perf_counter()
        server.kill()
        self.control.remove(name)
        del self.servers[name]
        took = self.control.wait_committed(version, SECONDS) - began
        print(f"a whole server, killed in a transfer: good again after {took:.2f} s", flush=True)
        return round(took, 3)

    def _publish(self) -> str:
        self.turn += 1
        version = f"step-{self.turn}"
        self.trainers.ask("publish", version=version, scale=1 + self.turn % 30 / 64)
        return version


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=list(PRESETS), default="qwen3-1.7b")
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument("--servers", default="tp1", help="such as tp1 or tp2,tp1")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--idle-rounds", type=int, default=10)
    parser.add_argument("--peer", action="store_true", help="vLLM's own nccl_m2n backend, to a server of tp1")
    parser.add_argument("--rounds", type=int, default=20, help="while streams decode")
    parser.add_argument("--streams", type=int, default=24, help="by server; 0: none")
    parser.add_argument("--contract", action="store_true", help="two more servers, without agents")
    parser.add_argument("--faults", action="store_true")
    parser.add_argument("--fresh", action="store_true", help="compare with a fresh server at the end")
    parser.add_argument("--transport", default="Auto", choices=["Auto", "NcclM2n", "NcclP2p", "Gloo"])
    parser.add_argument("--out", default="build/gpu_vllm")
    parser.add_argument("--vllm-arguments", default="")
    parser.add_argument("--limit", type=int, default=400, help="seconds for all")
    options = parser.parse_args()
    Path(options.out).mkdir(parents=True, exist_ok=True)
    logging.basicConfig(filename=Path(options.out, "control.log"), level=logging.INFO)
    signal.signal(signal.SIGALRM, lambda *_: sys.exit(f"not done within {options.limit} s"))
    signal.alarm(options.limit)
    Bench(options).run()


if __name__ == "__main__":
    main()
