"""One real vLLM worker whose mover writes the live weights: where they lie, and what may be said of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.integration.vllm import serving, tiny
from tests.integration.vllm.test_worker import Changed, greedy, receive, rpc, worker

from weightsync_engine.vllm import inplace
from weightsync_engine.vllm.inplace import InPlace

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [tiny.make_checkpoint(folder / f"model-{i}", i, tied=True) for i in (1, 2)]


@pytest.fixture(scope="module")
def llm(checkpoints: list[Path]) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEIGHTSYNC_COMMIT", "InPlace")
        with serving.in_process(checkpoints[0]) as llm:
            yield llm


def test_the_live_weights_lie_in_the_slab_and_nothing_else_is_as_large(llm: Any) -> None:
    engine = worker(llm).weight_transfer_engine
    assert engine.problem is None
    assert isinstance(engine.shadow, InPlace)
    slab, model = engine.shadow.slab, worker(llm).model_runner.get_model()
    begin = slab._payload.data_ptr()
    weights = {p.data_ptr(): p for _, p in model.named_parameters(remove_duplicate=False)}
    assert all(begin <= p.data_ptr() < begin + slab.payload_bytes for p in weights.values())
    assert slab.payload_bytes < 1.1 * sum(p.numel() * p.element_size() for p in weights.values())
    assert {p.untyped_storage().data_ptr() for p in weights.values()} == {
        slab._payload.untyped_storage().data_ptr()
    }
    embed = model.get_submodule("model.embed_tokens")
    assert embed.weight.data_ptr() == model.get_submodule("lm_head").weight.data_ptr(), "tied, and still so"
    assert callable(embed.weight.weight_loader)


def test_a_transfer_writes_what_vllm_computes_with_and_the_flip_only_names_it(
    llm: Any, checkpoints: list[Path]
) -> None:
    first, second = checkpoints
    assert rpc(llm, "weightsync_describe")["in_place"] is True
    assert greedy(llm, tiny.PROMPT, 24) == tiny.Reference(first).greedy(tiny.PROMPT, 24)
    model = worker(llm).model_runner.get_model()
    pointers = {name: p.data_ptr() for name, p in model.named_parameters()}
    receive(llm, second, "step-1", 1)
    said = rpc(llm, "weightsync_live")
    assert (said["version"], said["torn"], said["problem"]) == ("", True, {}), "written, and not decided"
    answer = rpc(llm, "weightsync_flip", object_uid="uid", epoch=1, round=1, version="step-1")
    assert (answer["version"], answer["torn"], answer["problem"]) == ("step-1", False, {})
    assert greedy(llm, tiny.PROMPT, 24) == tiny.Reference(second).greedy(tiny.PROMPT, 24)

    written = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == pointers
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.load_weights(tiny.load(second).items())
    for name, parameter in model.named_parameters():
        assert torch.equal(written[name], parameter), name


def test_what_was_half_written_is_torn_until_a_whole_version_is_live(
    llm: Any, checkpoints: list[Path]
) -> None:
    slab = worker(llm).weight_transfer_engine.shadow.slab
    slab.begin_write()
    slab._payload[: slab.payload_bytes // 2].zero_()
    assert rpc(llm, "weightsync_live")["torn"]
    answer = rpc(llm, "weightsync_flip", object_uid="uid", epoch=1, round=2, version="step-2")
    assert (answer["problem"]["reason"], answer["torn"]) == ("WeightsNotVerified", True)
    receive(llm, checkpoints[0], "step-3", 3)
    answer = rpc(llm, "weightsync_flip", object_uid="uid", epoch=1, round=3, version="step-3")
    assert (answer["version"], answer["torn"]) == ("step-3", False)
    assert greedy(llm, tiny.PROMPT, 16) == tiny.Reference(checkpoints[0]).greedy(tiny.PROMPT, 16)


def test_without_an_agent_that_stops_generation_it_is_refused(llm: Any) -> None:
    with pytest.raises(Exception, match="needs the pod's agent"):
        llm.init_weight_transfer_engine({"init_info": {}})


def test_set_ups_that_do_not_go_with_it_are_refused_with_the_reason(llm: Any) -> None:
    config = worker(llm).vllm_config
    assert inplace.refusal(config) == ""
    sleeps = Changed(config, model_config=Changed(config.model_config, enable_sleep_mode=True))
    assert "sleep mode" in inplace.refusal(sleeps)
    drafts = Changed(config, speculative_config=SimpleNamespace(method="eagle", draft_model_config=object()))
    assert "draft model" in inplace.refusal(drafts)


@pytest.mark.parametrize("value", ["inplace", "Fast"])
def test_a_setting_that_does_not_exist_is_told(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from weightsync_engine.vllm.engine import commit_mode

    monkeypatch.setenv("WEIGHTSYNC_COMMIT", value)
    with pytest.raises(ValueError, match=f"WEIGHTSYNC_COMMIT is '{value}': set it to Staged or InPlace"):
        commit_mode()
