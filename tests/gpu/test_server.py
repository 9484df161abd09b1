"""Real vLLM servers on one GPU, and a trainer's pod beside them: whole rounds for a server with a shadow, one whose
movers write its live weights, and one that decodes speculatively; and what becomes of them when somebody dies.

Each of two servers loads another checkpoint by itself: what one says at first is what the other must say once it has
been given that checkpoint's weights.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.integration.mover.fleet import stopped
from tests.integration.vllm import tiny
from tests.integration.vllm.fleet import Fleet
from tests.integration.vllm.serving import Operator, Stream, VllmProcess, command_line, streaming

from weightsync_engine.protocol.messages import AgentState, EpochPhase, RoundPhase
from weightsync_engine.protocol.names import ENV_COMMIT, IN_PLACE

pytestmark = pytest.mark.timeout(400)

TOKENS = 24
LONG = 1900
"""Tokens of a request that its client ends."""


def server(
    checkpoint: Path, folder: Path, operator: Operator, *arguments: str, **environment: str | None
) -> VllmProcess:
    """A server as users start one: vLLM's own settings of these tests' environment, CUDA graphs and all."""
    own: dict[str, str | None] = {
        k: v for k, v in os.environ.items() if k.startswith("VLLM_") and k != "VLLM_PLUGINS"
    }
    return VllmProcess(
        checkpoint, folder, operator, live_weights=False, environment=own | environment,
        arguments=("--dtype", "bfloat16", "--gpu-memory-utilization", "0.1", "--max-model-len", "2048", *arguments),
    )  # fmt: skip


class TrainerPod:
    """As `tests.integration.vllm.fleet.Trainer`, in a process of its own."""

    def __init__(self, folder: Path, operator: Operator, checkpoint: Path, draft: Path) -> None:
        folder.mkdir()
        with (folder / "trainer.log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.gpu.trainer_main", folder, checkpoint, operator.jwks, draft],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip
        self.log = folder / "trainer.log"
        self.port = int(self._hear(120))
        self.url = f"http://127.0.0.1:{self.port}"

    def publish(self, checkpoint: Path, version: str) -> None:
        said = {"checkpoint": str(checkpoint), "version": version, "draft": str(draft_of(checkpoint))}
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(said) + "\n")
        self.process.stdin.flush()
        self._hear(60)

    def _hear(self, seconds: float) -> str:
        timer = threading.Timer(seconds, self.process.kill)
        timer.start()
        assert self.process.stdout is not None
        try:
            line = self.process.stdout.readline()
        finally:
            timer.cancel()
        assert line, f"the trainer's pod ended, or was too slow:\n{self.log.read_text()[-3000:]}"
        return line

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)


def draft_of(checkpoint: Path) -> Path:
    """A draft model that proposes what the target would say."""
    return checkpoint.with_name(f"draft-of-{checkpoint.name}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("servers")


@pytest.fixture(scope="module")
def checkpoints(folder: Path) -> list[Path]:
    made = [tiny.make_checkpoint(folder / f"model-{i}", i, tied=True, dtype="bfloat16") for i in range(2)]
    for checkpoint in made:
        shutil.copytree(checkpoint, draft_of(checkpoint))
    return made


@pytest.fixture(scope="module")
def operator(folder: Path) -> Operator:
    return Operator(folder / "operator")


@pytest.fixture(scope="module")
def fleet(folder: Path, checkpoints: list[Path], operator: Operator) -> Iterator[Fleet]:
    """`staged` loads the first checkpoint, `in-place` the second, `speculative` the first, with its draft model."""
    said = {"method": "draft_model", "model": str(draft_of(checkpoints[0])), "num_speculative_tokens": 2}
    servers = [
        server(checkpoints[0], folder / "staged", operator),
        server(checkpoints[1], folder / "in-place", operator, **{ENV_COMMIT: IN_PLACE}),
        server(checkpoints[0], folder / "speculative", operator, "--speculative-config", json.dumps(said)),
    ]
    trainer = None
    try:
        for one in servers:
            one.start()
        trainer = TrainerPod(folder / "trainer", operator, checkpoints[0], draft_of(checkpoints[0]))
        for one in servers:
            one.wait_up()
        yield Fleet(operator, trainer, servers)  # type: ignore[arg-type]
    finally:
        if trainer is not None:
            trainer.kill()
        for one in servers:
            one.kill()


@pytest.fixture(scope="module")
def fresh(fleet: Fleet) -> list[list[int]]:
    """What a server says that has loaded the first checkpoint, and one that has loaded the second."""
    fleet.joined()
    fleet.admit(None)
    found = [one.greedy(tiny.PROMPT, TOKENS) for one in fleet.servers[:2]]
    assert found[0] != found[1]
    return found


def in_sync(fleet: Fleet, checkpoint: Path, version: str) -> None:
    """An epoch of all who are there, and a round."""
    states = [fleet.operator.state(url).epoch for url in fleet.urls]
    if any(s is None or s.phase is not EpochPhase.JOINED or s.epoch != fleet.epoch for s in states):
        fleet.joined()
    fleet.sync(checkpoint, f"{version}-{fleet.epoch}-{fleet.round}")


def proposals(one: VllmProcess) -> tuple[float, float]:
    """Tokens that its draft model has proposed, and those of them that were accepted."""
    text = httpx.get(one.url + "/metrics", trust_env=False, timeout=30).text
    return tuple(  # type: ignore[return-value]
        sum(float(n) for n in re.findall(rf"^vllm:spec_decode_num_{kind}_tokens_total\S* (\S+)$", text, re.M))
        for kind in ("draft", "accepted")
    )


def mover(one: VllmProcess) -> int:
    """The one that takes part, not the spare."""
    (pid,) = [p for p in one.movers() if Path(f"/proc/{p}/comm").read_text().startswith("ws-mover")]
    return pid


def settled(state: AgentState) -> bool:
    return state.round is not None and state.round.phase is not RoundPhase.TRANSFERRING


def ended(state: AgentState) -> bool:
    return state.round is not None and state.round.phase in (RoundPhase.FAILED, RoundPhase.ABORTED)


# Tests share the servers, and run in order: the last ones end some of them.


def test_every_server_says_what_a_fresh_load_says_and_proposals_go_on_being_accepted(
    fleet: Fleet, checkpoints: list[Path], fresh: list[list[int]]
) -> None:
    staged, in_place, speculative = fleet.servers
    for turn, which in enumerate((1, 0, 1, 0)):
        in_sync(fleet, checkpoints[which], f"turn-{turn}")
        assert [one.greedy(tiny.PROMPT, TOKENS) for one in (staged, in_place)] == [fresh[which]] * 2
        before = proposals(speculative)
        said = speculative.greedy(tiny.PROMPT, TOKENS)
        proposed, accepted = (now - then for now, then in zip(proposals(speculative), before, strict=True))
        print(
            f"turn {turn}: {accepted:.0f} of {proposed:.0f} proposals accepted; as others: {said == fresh[which]}"
        )
        assert proposed > 0 and accepted >= 0.9 * proposed


def test_what_streams_from_a_server_in_place_stands_still_for_the_transfer(
    fleet: Fleet, checkpoints: list[Path], fresh: list[list[int]]
) -> None:
    staged, in_place, _ = fleet.servers
    in_sync(fleet, checkpoints[0], "old")
    one, other = streaming([(in_place, [*tiny.PROMPT, 1]), (staged, [*tiny.PROMPT, 2])], LONG)
    fleet.trainer.publish(checkpoints[1], "streamed")
    fleet.prepare("streamed")
    standing = time.monotonic()
    fleet.transfer()
    transferred = time.monotonic()
    fleet.commit("streamed")
    fleet.admit("streamed")
    going_on = time.monotonic()
    grows(one, other)
    for stream in (one, other):
        stream.enough.set()
        stream.join(60)
        assert stream.error == ""
    assert not [t for t in one.times if standing + 0.2 < t < transferred], "tokens of half a version"
    print(
        f"prepared to committed {going_on - standing:.3f} s, of which transfer {transferred - standing:.3f} s"
    )
    for server_ in (staged, in_place):
        assert server_.greedy(tiny.PROMPT, TOKENS) == fresh[1]


def grows(*streams: Stream) -> None:
    before, deadline = [len(s.tokens) for s in streams], time.monotonic() + 60
    while any(len(s.tokens) < n + 20 for s, n in zip(streams, before, strict=True)):
        assert not [s.error for s in streams if s.error]
        assert time.monotonic() < deadline, "a request does not go on"
        time.sleep(0.01)


@pytest.mark.parametrize("delay", [0.0, 0.01, 0.03, 1.0])
def test_a_mover_in_place_that_is_killed_leaves_the_old_version_or_503s_until_the_next_round(
    fleet: Fleet, checkpoints: list[Path], fresh: list[list[int]], delay: float
) -> None:
    """At any point of the transfer, or after it: what is whole but not decided is no version either."""
    staged, in_place, _ = fleet.servers
    in_sync(fleet, checkpoints[0], "old")
    fleet.trainer.publish(checkpoints[1], f"broken-{delay}")
    fleet.prepare(f"broken-{delay}")
    fleet.tell("transfer", epoch=fleet.epoch, round=fleet.round, deadline_seconds=20)
    time.sleep(delay)
    os.kill(mover(in_place), signal.SIGKILL)
    state = fleet.operator.until(in_place.url, settled, 40, "the transfer is over here")
    assert state.round is not None
    whole = state.round.phase is RoundPhase.VERIFIED
    fleet.abort()
    state = fleet.operator.until(
        in_place.url,
        lambda s: s.inference is not None and s.inference.torn >= whole,
        20,
        "what was written is torn",
    )
    assert state.inference is not None
    print(
        f"killed after {delay:g} s: whole {whole}, torn {state.inference.torn}, {state.inference.closed_because}"
    )
    answer = in_place.complete(tiny.PROMPT, TOKENS)
    if state.inference.torn:
        assert answer.status_code == 503
    else:
        assert answer.json()["choices"][0]["token_ids"] == fresh[0]
    assert whole or delay < 1
    assert staged.greedy(tiny.PROMPT, TOKENS) == fresh[0]
    in_sync(fleet, checkpoints[1], "mended")
    assert [one.greedy(tiny.PROMPT, TOKENS) for one in (staged, in_place)] == [fresh[1]] * 2


def test_a_trainer_that_is_killed_in_a_transfer_costs_the_servers_nothing_but_the_round(
    fleet: Fleet, checkpoints: list[Path], fresh: list[list[int]], operator: Operator, folder: Path
) -> None:
    staged, in_place, _ = fleet.servers
    in_sync(fleet, checkpoints[0], "old")
    fleet.trainer.publish(checkpoints[1], "orphan")
    fleet.prepare("orphan")
    with stopped(mover(staged)):  # so that the transfer does not end before
        fleet.tell("transfer", epoch=fleet.epoch, round=fleet.round, deadline_seconds=10)
        operator.until(
            in_place.url,
            lambda s: s.round is not None and s.round.phase is RoundPhase.TRANSFERRING,
            10,
            "begun",
        )
        fleet.trainer.kill()  # type: ignore[attr-defined]
        began = time.monotonic()
    for one in fleet.servers:
        state = operator.until(one.url, ended, 20, "the round ends by its deadline")
        assert state.round is not None and state.round.problem is not None
        print(f"after {time.monotonic() - began:.1f} s: {state.round.problem.message}")
    assert staged.greedy(tiny.PROMPT, TOKENS) == fresh[0]
    fleet.trainer = TrainerPod(folder / "next", operator, checkpoints[0], draft_of(checkpoints[0]))  # type: ignore[assignment]
    in_sync(fleet, checkpoints[1], "next-run")
    assert [one.greedy(tiny.PROMPT, TOKENS) for one in (staged, in_place)] == [fresh[1]] * 2


def test_a_frozen_worker_holds_up_its_own_server_alone(
    fleet: Fleet, checkpoints: list[Path], fresh: list[list[int]]
) -> None:
    staged, in_place, speculative = fleet.servers
    in_sync(fleet, checkpoints[0], "old")
    fleet.trainer.publish(checkpoints[1], "frozen")
    fleet.prepare("frozen")
    fleet.transfer()
    with stopped(worker(staged)):
        fleet.tell("commit", epoch=fleet.epoch, round=fleet.round, version="frozen", deadline_seconds=3)
        for one in (in_place, speculative):
            fleet.operator.until(
                one.url,
                lambda s: s.inference is not None and s.inference.live_version == "frozen",
                10,
                "flipped",
            )
        state = fleet.operator.until(
            staged.url, lambda s: s.inference is not None and not s.inference.serving, 20, "closed"
        )
        assert state.inference is not None
        print(state.inference.closed_because)
        assert staged.complete(tiny.PROMPT, 1).status_code == 503
    # Again, as the operator does until it is done.
    fleet.tell("commit", epoch=fleet.epoch, round=fleet.round, version="frozen", deadline_seconds=30)
    fleet.operator.until(
        staged.url, lambda s: s.round is not None and s.round.phase is RoundPhase.COMMITTED, 40, "committed"
    )
    in_sync(fleet, checkpoints[1], "thawed")
    assert [one.greedy(tiny.PROMPT, TOKENS) for one in (staged, in_place)] == [fresh[1]] * 2


def test_a_worker_that_is_killed_in_a_transfer_ends_the_round_and_the_others_go_on(
    fleet: Fleet, checkpoints: list[Path], fresh: list[list[int]]
) -> None:
    staged, in_place, speculative = fleet.servers
    in_sync(fleet, checkpoints[0], "old")
    fleet.trainer.publish(checkpoints[1], "lost")
    fleet.prepare("lost")
    fleet.tell("transfer", epoch=fleet.epoch, round=fleet.round, deadline_seconds=10)
    began = time.monotonic()
    os.kill(worker(speculative), signal.SIGKILL)
    fleet.servers.remove(speculative)
    for url in fleet.urls:
        fleet.operator.until(url, settled, 20, "not for ever")
    fleet.abort()
    fleet.joined()  # whether the round had ended well or not, an epoch of those that are left
    in_sync(fleet, checkpoints[1], "without")
    print(f"in sync without it after {time.monotonic() - began:.1f} s")
    assert [one.greedy(tiny.PROMPT, TOKENS) for one in (staged, in_place)] == [fresh[1]] * 2


def worker(one: VllmProcess) -> int:
    """The process that has the model: with one worker vLLM's engine runs it itself."""
    names = {pid: Path(f"/proc/{pid}/comm").read_text() for pid in one.tree()}
    found = [
        pid for pid, name in names.items() if name.startswith("VLLM::") or b"EngineCore" in command_line(pid)
    ]
    assert len(found) == 1, names
    return found[0]
