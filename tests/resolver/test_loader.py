"""vLLM's layerwise reload of the modules that need it, and of no others: its own code, on small modules."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

from weightsync_engine.resolve.fallback import Rerunnable
from weightsync_engine.resolve.loader import LoaderError, ModelLoader


class Reversing(QuantizeMethodBase):
    """A kernel's layout: rows in reverse, and a scale beside them."""

    def create_weights(self, layer: nn.Module, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def apply(self, layer: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise NotImplementedError

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        layer.weight = nn.Parameter(layer.weight.detach().flip(0).contiguous(), requires_grad=False)
        layer.scale = nn.Parameter(layer.weight.detach().abs().amax().reshape(1), requires_grad=False)


class Layer(nn.Module):
    def __init__(self, method: QuantizeMethodBase | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 3), requires_grad=False)
        self.quant_method = method


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.permuted, self.plain, self.other = Layer(Reversing()), Layer(), Layer(Reversing())
        self.calls = 0

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        self.calls += 1
        parameters, loaded = dict(self.named_parameters()), set()
        for name, value in weights:
            parameter = parameters[name]
            getattr(parameter, "weight_loader", default_weight_loader)(parameter, value)
            loaded.add(name)
        return loaded


def values(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {f"{name}.weight": torch.randn(4, 3) for name in ("permuted", "plain", "other")}


@pytest.fixture
def model() -> Model:
    """As vLLM would leave it: recorded, loaded, processed."""
    model = Model()
    record_metadata_for_reloading(model)
    model.load_weights(values(1).items())
    for layer in (model.permuted, model.other):
        layer.quant_method.process_weights_after_loading(layer)
    model.calls = 0
    return model


GROUP = Rerunnable(("permuted.weight",), ("permuted.scale", "permuted.weight"), ("permuted",), ())


def loader(model: Model) -> ModelLoader:
    config = VllmConfig()
    config.model_config = SimpleNamespace(dtype=torch.float32)
    return ModelLoader(model, [GROUP], config)


def state(model: nn.Module) -> dict[str, tuple[int, list[float]]]:
    return {n: (p.data_ptr(), p.flatten().tolist()) for n, p in model.named_parameters()}


def test_a_permuted_layer_is_loaded_and_processed_again_in_its_own_memory_round_after_round(
    model: Model,
) -> None:
    # C28
    first, reload = state(model), loader(model)
    assert reload.unfit(GROUP, False) == ""
    assert reload.rehearse(values(1).__getitem__) == {}
    assert state(model) == first, "the trial changes nothing"
    for round_, seed in enumerate((2, 3, 2), start=2):
        asked: list[str] = []

        def whole(name: str, seed: int = seed, asked: list[str] = asked) -> torch.Tensor:
            asked.append(name)
            return values(seed)[name]

        reload.load(whole)
        want = values(seed)["permuted.weight"].flip(0)
        assert torch.equal(model.permuted.weight, want), seed
        assert model.permuted.scale.item() == want.abs().max().item()
        assert asked == ["permuted.weight"] and model.calls == round_, "once each, in one load_weights"
        now = state(model)
        assert {n: at for n, (at, _) in now.items()} == {n: at for n, (at, _) in first.items()}
        assert {n: v for n, v in now.items() if "permuted" not in n} == {
            n: v for n, v in first.items() if "permuted" not in n
        }, "what was written directly"


def test_a_failure_inside_a_reload_leaves_modules_with_memory_and_loaders_and_the_next_round_mends_it(
    model: Model,
) -> None:
    first, reload = state(model), loader(model)

    def failing(name: str) -> torch.Tensor:
        raise OSError("no such slab")

    with pytest.raises(LoaderError, match=r"at permuted\.weight: OSError: no such slab"):
        reload.load(failing)
    assert {n: at for n, (at, _) in state(model).items()} == {n: at for n, (at, _) in first.items()}
    assert not any(p.is_meta for p in model.parameters())
    reload.load(values(2).__getitem__)
    assert torch.equal(model.permuted.weight, values(2)["permuted.weight"].flip(0))


def test_a_layer_whose_processing_is_not_the_same_twice_is_not_loaded_again(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = state(model)
    monkeypatch.setattr(Reversing, "process_weights_after_loading", lambda self, layer: None)
    (why,) = loader(model).rehearse(values(1).__getitem__).values()
    assert "permuted." in why
    assert state(model) == first


def test_modules_of_which_vllm_kept_no_record_are_not_reloaded() -> None:
    assert "no record of permuted" in loader(Model()).unfit(GROUP, False)


def test_without_vllms_configuration_nothing_is_reloaded(model: Model) -> None:
    assert "configuration" in ModelLoader(model, [GROUP]).unfit(GROUP, False)


def test_a_model_without_load_weights_is_refused() -> None:
    assert "no load_weights" in ModelLoader(nn.Module(), [GROUP]).unfit(GROUP, False)


def test_a_loader_that_loads_less_than_when_it_was_tried_is_told(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    reload = loader(model)
    assert reload.rehearse(values(1).__getitem__) == {}

    def nothing(weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        list(weights)
        return set()

    monkeypatch.setattr(model, "load_weights", nothing)
    with pytest.raises(LoaderError, match=r"did not load permuted\.weight"):
        reload.load(values(2).__getitem__)


@pytest.mark.parametrize("collective", ["torch", "vllm"])
def test_a_reload_that_would_wait_for_the_servers_other_workers_is_not_used(
    model: Model, monkeypatch: pytest.MonkeyPatch, collective: str
) -> None:
    """Scales that are agreed between workers: one that failed before would be waited for without end."""
    from vllm.distributed.parallel_state import GroupCoordinator

    first, process = state(model), Reversing.process_weights_after_loading

    def agreeing(self: Reversing, layer: nn.Module) -> None:
        largest = layer.weight.detach().amax()
        if collective == "torch":
            torch.distributed.all_reduce(largest)
        else:
            GroupCoordinator.all_reduce(object.__new__(GroupCoordinator), largest)
        process(self, layer)

    monkeypatch.setattr(Reversing, "process_weights_after_loading", agreeing)
    before = torch.distributed.all_reduce
    (why,) = loader(model).rehearse(values(1).__getitem__).values()
    assert "calls all_reduce" in why and "others" in why
    assert state(model) == first
    assert torch.distributed.all_reduce is before


def test_a_copy_that_a_layers_kernel_keeps_is_found_and_must_be_made_anew(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    # C04
    def keeps(self: Reversing, layer: nn.Module) -> None:
        layer.weight = nn.Parameter(layer.weight.detach().flip(0).contiguous(), requires_grad=False)
        self.config = SimpleNamespace(kept=[layer.weight.detach().clone()])

    with monkeypatch.context() as patch:
        patch.setattr(Reversing, "process_weights_after_loading", keeps)
        for layer in (model.permuted, model.other):
            layer.quant_method.process_weights_after_loading(layer)
            layer.quant_method.process_weights_after_loading(layer)
            layer._parameters.pop("scale")
        kept = model.permuted.quant_method.config.kept[0]
        group = replace(GROUP, live=("permuted.weight",))
        config = VllmConfig()
        config.model_config = SimpleNamespace(dtype=torch.float32)
        again = ModelLoader(model, [group], config)
        (why,) = again.rehearse(
            {"permuted.weight": model.permuted.weight.detach().flip(0).clone()}.__getitem__
        ).values()
    assert "moves permuted.quant_method.config.kept.0 to other memory" in why
    assert model.permuted.quant_method.config.kept[0] is kept
