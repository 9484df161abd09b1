"""Real servers of two less common kinds, each with two trainer ranks and real movers, in whole rounds over HTTP: two
engines (data parallelism), and a model that vLLM's own loader has to help with.

Engines that share their experts are tested offline (`tests/resolver`): vLLM's CPU build cannot compute with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from tests.integration.vllm import test_loader, tiny
from tests.integration.vllm.fleet import Fleet, Trainer
from tests.integration.vllm.serving import Operator, VllmProcess, completion

pytestmark = pytest.mark.timeout(1800)


@dataclass
class Kind:
    fleet: Fleet
    checkpoints: list[Path]
    references: list[tiny.Reference]

    @property
    def server(self) -> VllmProcess:
        return self.fleet.servers[0]


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Kind]]:
    folder = tmp_path_factory.mktemp("engines")
    operator = Operator(folder / "operator")
    makers = {
        "engines": (
            lambda folder, seed: tiny.make_checkpoint(folder, seed, tied=False),
            ("--data-parallel-size", "2", "--api-server-count", "1"),
        ),
        "loader": (test_loader.make_checkpoint, ()),
    }
    found: dict[str, Kind] = {}
    with ExitStack() as stack:
        for name, (make, arguments) in makers.items():
            checkpoints = [make(folder / f"{name}-{seed}", seed) for seed in range(3)]
            server = VllmProcess(checkpoints[0], folder / name, operator, arguments=arguments)
            stack.callback(server.kill)
            server.start()
            trainer = Trainer(folder / f"trainer-{name}", operator, checkpoints[0])
            stack.callback(trainer.close)
            references = [tiny.Reference(checkpoint) for checkpoint in checkpoints]
            found[name] = Kind(Fleet(operator, trainer, [server]), checkpoints, references)
        for kind in found.values():
            kind.server.wait_up()
        yield found


def of_engine(server: VllmProcess, engine: int, tokens: int) -> list[int]:
    answer = httpx.post(
        server.url + "/v1/completions", json=completion(tiny.PROMPT, tokens), timeout=300, trust_env=False,
        headers={"X-data-parallel-rank": str(engine)},
    )  # fmt: skip
    assert answer.status_code == 200, answer.text
    return list(answer.json()["choices"][0]["token_ids"])


def test_every_engine_of_a_server_goes_over_to_each_version(kinds: dict[str, Kind]) -> None:
    kind = kinds["engines"]
    kind.fleet.joined()
    states = [kind.fleet.operator.state(kind.server.url)]
    assert [s.inference.workers for s in states if s.inference] == [2]
    kind.fleet.admit(None)
    for version in (0, 1, 2):
        if version:
            kind.fleet.sync(kind.checkpoints[version], f"step-{version}")
        wanted = kind.references[version].greedy(tiny.PROMPT, 16)
        for engine in (0, 1):
            assert of_engine(kind.server, engine, 16) == wanted, (version, engine)


def test_what_cannot_be_written_directly_goes_through_vllms_loader(kinds: dict[str, Kind]) -> None:
    kind = kinds["loader"]
    kind.fleet.joined()
    kind.fleet.admit(None)
    assert "by vLLM's loader: model.layers.1.feed_forward.experts" in kind.server.log.read_text()
    for version in (0, 1, 2):
        if version:
            kind.fleet.sync(kind.checkpoints[version], f"step-{version}")
        assert kind.server.greedy(tiny.PROMPT, 16) == kind.references[version].greedy(tiny.PROMPT, 16), (
            version
        )
