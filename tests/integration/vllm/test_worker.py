"""One real vLLM worker in this process: what is resolved, and that a flip does what a fresh load would do."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.integration.vllm import serving, tiny
from tests.integration.vllm.fleet import Trainer

from weightsync_engine.layout.boxes import Box
from weightsync_engine.layout.tensors import DTYPE_BYTES
from weightsync_engine.resolve.checkpoint import Checkpoint, open_checkpoint
from weightsync_engine.resolve.manifest import TRANSFORMS, Resolved, region_of, resolve

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def first(folder: Path) -> Path:
    return tiny.make_checkpoint(folder / "first", 1, tied=True)


@pytest.fixture(scope="module")
def second(folder: Path) -> Path:
    return tiny.make_checkpoint(folder / "second", 2, tied=True)


@pytest.fixture(scope="module")
def llm(first: Path) -> Iterator[Any]:
    with serving.in_process(first) as llm:
        yield llm


def worker(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker


@pytest.fixture
def model(llm: Any) -> torch.nn.Module:
    return worker(llm).model_runner.get_model()  # type: ignore[no-any-return]


@pytest.fixture
def checkpoint(first: Path) -> Iterator[Checkpoint]:
    with open_checkpoint(str(first), None, "auto") as opened:
        yield opened


def receive(llm: Any, checkpoint: Path, version: str, round_: int, draft: Path | None = None) -> None:
    """What a mover does: fill the shadow from a checkpoint (and a draft model's) by the manifest, and stamp it."""
    engine = worker(llm).weight_transfer_engine
    manifest, slab, source = engine.resolved.manifest, engine.shadow.slab, tiny.load(checkpoint)
    if draft is not None:
        source |= {f"draft.{name}": tensor for name, tensor in tiny.load(draft).items()}
    slab.begin_write()
    for piece in manifest.pieces:
        index = tuple(slice(a, b) for a, b in zip(piece.box.start, piece.box.stop, strict=True))
        region_of(slab.tensor(manifest.tensors[piece.tensor]), piece.region).copy_(source[piece.name][index])
    slab.stamp(version, round_)


def greedy(llm: Any, prompt: list[int], tokens: int) -> list[int]:
    from vllm import SamplingParams

    llm.reset_prefix_cache()
    (out,) = llm.generate(
        [{"prompt_token_ids": prompt}],
        SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False),
        use_tqdm=False,
    )
    return list(out.outputs[0].token_ids)


def rpc(llm: Any, method: str, **arguments: Any) -> dict[str, Any]:
    (answer,) = llm.collective_rpc(method, kwargs=arguments | {"nonce": "n"})
    assert answer["nonce"] == "n"
    return dict(answer)


def test_a_flip_does_what_vllms_own_loader_would_do_bit_for_bit(
    llm: Any, model: torch.nn.Module, first: Path, second: Path
) -> None:
    assert greedy(llm, tiny.PROMPT, 24) == tiny.Reference(first).greedy(tiny.PROMPT, 24)
    before = rpc(llm, "weightsync_live")
    assert (before["version"], before["torn"], before["problem"]) == ("", False, {})

    receive(llm, second, "step-1", 1)
    pointers = {name: p.data_ptr() for name, p in model.named_parameters()}
    answer = rpc(llm, "weightsync_flip", object_uid="uid", epoch=1, round=1, version="step-1")
    assert (answer["version"], answer["torn"], answer["problem"]) == ("step-1", False, {})
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == pointers
    assert greedy(llm, tiny.PROMPT, 24) == tiny.Reference(second).greedy(tiny.PROMPT, 24)

    flipped = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.load_weights(tiny.load(second).items())  # type: ignore[operator]
    for name, parameter in model.named_parameters():
        assert torch.equal(flipped[name], parameter), name


def test_a_flip_of_what_was_not_verified_changes_nothing(llm: Any, model: torch.nn.Module) -> None:
    held = {name: p.detach().clone() for name, p in model.named_parameters()}
    live = rpc(llm, "weightsync_live")["version"]
    answer = rpc(llm, "weightsync_flip", object_uid="uid", epoch=1, round=9, version="step-9")
    assert answer["problem"]["reason"] == "ShadowNotVerified"
    assert (answer["version"], answer["torn"]) == (live, False)
    assert all(torch.equal(held[name], p) for name, p in model.named_parameters())


def test_a_call_that_breaks_in_a_worker_is_an_answer_and_no_exception(llm: Any) -> None:
    answer = rpc(llm, "weightsync_flip", object_uid="uid", epoch=1, round=1, version="")
    assert answer["problem"]
    engine = worker(llm).weight_transfer_engine
    shadow, engine.shadow = engine.shadow, object()
    try:
        answer = rpc(llm, "weightsync_flip", object_uid="uid", epoch=1, round=1, version="step-1")
    finally:
        engine.shadow = shadow
    assert (answer["problem"]["reason"], answer["torn"]) == ("WorkerFailed", True)


def test_every_live_element_has_exactly_one_place(llm: Any, model: torch.nn.Module, second: Path) -> None:
    # C14
    engine = worker(llm).weight_transfer_engine
    resolved: Resolved = engine.resolved
    manifest = resolved.manifest
    assert manifest.unresolved == {}
    assert {name: whole.shape for name, whole in manifest.expected.items()} == {
        name: tuple(tensor.shape) for name, tensor in tiny.load(second).items() if name != "lm_head.weight"
    }
    parameters = dict(model.named_parameters(remove_duplicate=False))
    written = {id(p): torch.zeros(p.shape, dtype=torch.int64) for p in parameters.values()}
    for piece in manifest.pieces:
        view, live = resolved.views[piece.tensor], parameters[piece.tensor.rpartition(" in ")[2]]
        assert view.untyped_storage().data_ptr() == live.untyped_storage().data_ptr()
        at = view.storage_offset() - live.storage_offset()
        region_of(written[id(live)].as_strided(view.shape, view.stride(), at), piece.region).add_(1)
    for name, parameter in model.named_parameters():
        count = written[id(parameter)]
        rows = tiny.VOCABULARY if "embed" in name else count.shape[0]
        assert (count[:rows] == 1).all(), name
        assert (count[rows:] == 0).all(), f"padding of {name} is written"


def test_a_parameter_of_all_layers_is_one_run_of_the_shadow(llm: Any) -> None:
    manifest = worker(llm).weight_transfer_engine.resolved.manifest
    for kind in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"):
        places = {p.name: manifest.tensors[p.tensor] for p in manifest.pieces}
        first, second = (places[f"model.layers.{layer}.{kind}.weight"] for layer in (0, 1))
        assert second.offset - first.offset == math.prod(first.shape) * DTYPE_BYTES[first.dtype], kind


def test_a_tied_head_is_one_destination_with_two_names(llm: Any) -> None:
    manifest = worker(llm).weight_transfer_engine.resolved.manifest
    assert manifest.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    (piece,) = [p for p in manifest.pieces if p.name == "model.embed_tokens.weight"]
    assert piece.box == Box((0, 0), (tiny.VOCABULARY, 64))


def test_the_description_names_the_movers_socket(llm: Any) -> None:
    answer = rpc(llm, "weightsync_describe")
    assert Path(answer["socket"]).parent.stat().st_mode & 0o077 == 0
    assert answer["parameters"] == 24
    assert answer["unresolved"] == {}
    assert answer["not_compared"] == ""


# ---- vLLM's own contract, without Kubernetes ---------------------------------------------------------------


def test_vllms_own_contract_carries_a_version_over_the_same_movers(
    llm: Any, folder: Path, first: Path, second: Path
) -> None:
    operator = serving.Operator(folder / "operator")
    trainer = Trainer(folder / "trainer", operator, first)
    key, where = "k" * 32, {"host": "127.0.0.1", "port": trainer.port}
    boot = operator.state(trainer.url).boot_id
    try:
        trainer.publish(second, "own-1")
        operator.tell(
            trainer.url, "join", boot, epoch=5, first_rank=0, world_size=3, trainer_ranks=2, key=key,
            lead_agent=where, deadline_seconds=60,
        )  # fmt: skip
        store = operator.until(trainer.url, lambda s: bool(s.epoch and s.epoch.rendezvous), 60).epoch
        assert store is not None and store.rendezvous is not None
        init = {
            "rank_offset": 2, "world_size": 3, "trainer_ranks": 2, "master_address": store.rendezvous.host,
            "master_port": store.rendezvous.port, "key": key, "epoch": 5, "object_uid": serving.OBJECT,
            "deadline_seconds": 60,
        }  # fmt: skip
        llm.init_weight_transfer_engine({"init_info": init})
        operator.until(trainer.url, lambda s: s.epoch is not None and s.epoch.phase == "Joined", 60)
        operator.tell(
            trainer.url, "prepare", boot, epoch=5, round=1, version="own-1", deadline_seconds=60,
            decide_by_seconds=600,
        )  # fmt: skip
        operator.until(trainer.url, lambda s: s.round is not None and s.round.phase == "Ready", 60)
        operator.tell(trainer.url, "transfer", boot, epoch=5, round=1, deadline_seconds=60)
        llm.start_weight_update()
        update = {"version": "own-1", "round": 1, "deadline_seconds": 60}
        llm.update_weights({"update_info": update})
        assert rpc(llm, "weightsync_live")["version"] != "own-1"
        llm.finish_weight_update()
        assert rpc(llm, "weightsync_live")["version"] == "own-1"
        assert greedy(llm, tiny.PROMPT, 16) == tiny.Reference(second).greedy(tiny.PROMPT, 16)
    finally:
        trainer.close()


@pytest.mark.parametrize(
    ("init", "said"),
    [
        ({"rank_offset": 0, "nonsense": 1}, "nonsense"),
        ({"rank_offset": 2, "world_size": 3, "trainer_ranks": 2, "key": "short"}, "port"),
    ],
)
def test_a_wrong_init_is_said_at_once_and_changes_nothing(llm: Any, init: dict[str, Any], said: str) -> None:
    with pytest.raises(Exception, match=said):
        llm.init_weight_transfer_engine({"init_info": init})
    with pytest.raises(Exception, match="has not succeeded"):
        llm.llm_engine.collective_rpc("start_weight_update")
        llm.llm_engine.collective_rpc("update_weights", kwargs={"update_info": {"version": "v", "round": 1}})


def test_with_several_workers_a_failure_is_kept_and_never_raised(
    llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = worker(llm).weight_transfer_engine
    monkeypatch.setattr(engine.parallel_config, "world_size", 2)
    engine.init_transfer_engine(engine.parse_init_info({"nonsense": 1}))
    assert "nonsense" in engine.answer()["update_problem"]
    engine.update_weights({"version": "v", "round": 1})
    assert "has not succeeded" in engine.answer()["update_problem"]
    engine.finish_weight_update()
    assert "no version was received" in engine.answer()["update_problem"]


# ---- what is refused, on the live model with one thing changed
# ----------------------------------------------


def reason(model: torch.nn.Module, checkpoint: Checkpoint | None, name: str) -> str:
    resolved = resolve(model, checkpoint, "test")
    assert [p for p in resolved.manifest.pieces if p.name == name] == []
    assert name not in resolved.manifest.expected
    return resolved.manifest.unresolved[name]


@pytest.fixture
def original(llm: Any, model: torch.nn.Module, first: Path) -> torch.nn.Module:
    """The model as it was loaded."""
    model.load_weights(tiny.load(first).items())  # type: ignore[operator]
    return model


def test_values_that_the_loader_changed_are_found_by_a_sample(
    original: torch.nn.Module, checkpoint: Checkpoint
) -> None:
    qkv = original.get_parameter("model.layers.1.self_attn.qkv_proj.weight")
    k = qkv.data[256 : 256 + 128]
    k[[0, 1]] = k[[1, 0]]
    name = "model.layers.1.self_attn.k_proj.weight"
    said = reason(original, checkpoint, name)
    assert said.startswith(TRANSFORMS)
    assert "leaves other values in model.layers.1.self_attn.qkv_proj.weight" in said, (
        "vLLM's loader, when tried"
    )
    assert resolve(original, checkpoint).manifest.unresolved.keys() == {name}


def test_an_empty_live_tensor_is_refused_under_the_checkpoints_names(
    original: torch.nn.Module, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    # C04
    module = original.get_submodule("model.layers.0.mlp.gate_up_proj")
    monkeypatch.setitem(module._parameters, "weight", torch.nn.Parameter(torch.empty(0), requires_grad=False))
    assert "is empty" in reason(original, checkpoint, "model.layers.0.mlp.up_proj.weight")


def test_a_layer_that_computes_with_a_packed_copy_is_refused(
    original: torch.nn.Module, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = original.get_submodule("model.layers.0.mlp.down_proj")
    packed = module.weight.detach().clone()
    monkeypatch.setattr(
        module, "cpu_linear", lambda x, weight, bias: torch.nn.functional.linear(x, packed, bias)
    )
    assert "packed copy" in reason(original, checkpoint, "model.layers.0.mlp.down_proj.weight")


def test_a_head_with_a_packed_copy_is_refused_though_it_is_tied(
    original: torch.nn.Module, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = original.get_submodule("lm_head")
    packed = head.weight.detach().clone()
    monkeypatch.setattr(
        head, "cpu_linear", lambda x, weight, bias: torch.nn.functional.linear(x, packed, bias)
    )
    assert "packed copy" in reason(original, checkpoint, "model.embed_tokens.weight")


def test_an_unknown_loader_is_run_again_and_a_lost_one_refused(
    original: torch.nn.Module, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = original.get_parameter("model.layers.0.self_attn.o_proj.weight")
    name = "model.layers.0.self_attn.o_proj.weight"
    loader = weight.weight_loader
    monkeypatch.setattr(weight, "weight_loader", lambda *a: loader(*a))
    resolved = resolve(original, checkpoint, "test").manifest
    assert "not known to copy plainly" in resolved.fallback[name]
    assert resolved.unresolved == {}
    monkeypatch.setattr(weight, "weight_loader", None)
    assert "loader is gone" in reason(original, checkpoint, name)


def test_a_layers_own_rank_is_compared_with_its_parameters(
    original: torch.nn.Module, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = original.get_parameter("model.layers.0.self_attn.o_proj.weight")
    monkeypatch.setattr(weight, "tp_rank", 1)
    assert "rank 1" in reason(original, checkpoint, "model.layers.0.self_attn.o_proj.weight")


def test_a_live_shape_that_is_no_share_is_refused_with_both_shapes(
    original: torch.nn.Module, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = original.get_submodule("model.layers.0.self_attn.o_proj")
    monkeypatch.setattr(module, "tp_size", 2)
    said = reason(original, checkpoint, "model.layers.0.self_attn.o_proj.weight")
    assert "[64, 256]" in said
    assert "of 2 should hold (128" in said


def test_quantised_layers_experts_and_strided_tensors_are_refused(
    original: torch.nn.Module, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    module = original.get_submodule("model.layers.0.mlp.down_proj")
    with monkeypatch.context() as m:
        m.setattr(module, "quant_method", type("Fp8LinearMethod", (), {})())
        assert "Fp8LinearMethod" in reason(original, checkpoint, name)
    with monkeypatch.context() as m:
        m.setattr(
            module, "__class__", type("Experts", (torch.nn.Module,), {"__module__": "x.fused_moe.layer"})
        )
        assert "experts" in reason(original, checkpoint, name)
    with monkeypatch.context() as m:
        m.setattr(module.weight, "data", module.weight.data.t().contiguous().t())
        assert "not contiguous" in reason(original, checkpoint, name)
    with monkeypatch.context() as m:
        m.setattr(module, "W_UK_T_dcp_qrep", torch.ones(1), raising=False)
        assert "W_UK_T_dcp_qrep" in reason(original, checkpoint, name)


def test_without_a_checkpoint_only_layers_that_load_plainly_are_resolved(
    original: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved = resolve(original, None, "the weights were loaded with --load-format dummy")
    assert resolved.manifest.unresolved == {}
    assert resolved.not_compared == "the weights were loaded with --load-format dummy"
    norm = original.get_submodule("model.norm")
    monkeypatch.setattr(norm, "__class__", type("OwnNorm", (type(norm),), {"__module__": "a.custom.model"}))
    said = reason(original, None, "model.norm.weight")
    assert "no checkpoint to compare with" in said


def test_a_reason_for_the_whole_model_refuses_all_of_it(original: torch.nn.Module) -> None:
    resolved = resolve(original, None, "", "LoRA is not supported")
    assert resolved.manifest.pieces == ()
    assert set(resolved.manifest.unresolved.values()) == {"LoRA is not supported"}


def test_a_checkpoint_of_other_shapes_is_told_with_both(
    original: torch.nn.Module, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.shapes["model.norm.weight"] = (128,)
    monkeypatch.setattr(checkpoint, "whole", lambda name: torch.zeros(128))
    said = resolve(original, checkpoint).manifest.unresolved["model.norm.weight"]
    assert "[128]" in said
    assert "[64]" in said


class Changed:
    """Another object as it is, but for some values."""

    def __init__(self, real: Any, **values: Any) -> None:
        self.__dict__ |= values
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def test_set_ups_that_cannot_be_updated_are_refused_with_the_reason(
    llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from weightsync_engine.vllm.engine import refusal

    config = worker(llm).vllm_config
    assert refusal(config) == ""
    for part, change, word in [
        ("parallel_config", {"enable_eplb": True}, "load balancing"),
        ("parallel_config", {"nnodes": 2}, "several pods"),
        ("parallel_config", {"data_parallel_size": 2}, "data parallelism over several pods"),
        ("parallel_config", {"distributed_executor_backend": "ray"}, "Ray"),
    ]:
        assert word in refusal(Changed(config, **{part: Changed(getattr(config, part), **change)}))
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    assert "VLLM_USE_RUST_FRONTEND" in refusal(config)


def test_what_a_draft_model_is_to_become_is_update_or_frozen_and_what_cannot_be_updated_is_said(
    llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # C27
    from weightsync_engine.vllm.engine import refusal

    config = worker(llm).vllm_config
    eagle = Changed(config, speculative_config=SimpleNamespace(parallel_drafting=False))
    parallel = Changed(config, speculative_config=SimpleNamespace(parallel_drafting=True))
    assert refusal(eagle) == ""
    assert "WEIGHTSYNC_DRAFT_MODEL=frozen" in refusal(parallel)
    monkeypatch.setenv("WEIGHTSYNC_DRAFT_MODEL", "frozen")
    assert refusal(eagle) == refusal(parallel) == ""
    monkeypatch.setenv("WEIGHTSYNC_DRAFT_MODEL", "none")
    assert "WEIGHTSYNC_DRAFT_MODEL is 'none': it is update (the default) or frozen" in refusal(eagle)
