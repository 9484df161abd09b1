"""The live weights in the mover's slab, and what a worker says of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from weightsync_engine.layout.tensors import WorkerManifest
from weightsync_engine.mover.slab import Slab, plan_slab
from weightsync_engine.resolve.manifest import Resolved
from weightsync_engine.vllm.inplace import InPlace, NotInPlace, unfit
from weightsync_engine.vllm.shadow import Flipped

WANT = Flipped("uid", 3, 7, "step-7")


class Model(nn.Module):
    """Two tensors, one of them under a second name, and a view of the other as a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.arange(24.0).view(6, 4), requires_grad=False)
        self.head = nn.Parameter(self.embed.data, requires_grad=False)
        self.scale = nn.Parameter(torch.arange(4.0), requires_grad=False)
        self.embed.weight_loader = "loads"  # type: ignore[attr-defined]
        self.columns = self.embed.data[1:4].t()
        self.register_buffer("bias", torch.ones(4))
        self.product: Callable[[torch.Tensor], torch.Tensor] = lambda x: x @ self.embed.t()


@pytest.fixture
def model() -> Model:
    return Model()


def resolved_of(model: Model) -> Resolved:
    views = {"embed": model.embed.data, "scale": model.scale.data, "bias": model.bias}
    views = {name: view.detach() for name, view in views.items()}
    tensors, size = plan_slab((name, tuple(view.shape), "float32") for name, view in views.items())
    return Resolved(WorkerManifest({}, (), tensors, {}), size, views, "")


def in_place(model: Model) -> InPlace:
    resolved = resolved_of(model)
    return InPlace(resolved, Slab.create(resolved.slab_bytes), model)


def write(live: InPlace, version: str, round_: int, value: float) -> None:
    """What a mover does."""
    live.slab.begin_write()
    live.slab._payload.view(torch.float32).fill_(value)
    live.slab.stamp(version, round_)


def test_what_the_mover_writes_is_what_the_model_computes_with(model: Model) -> None:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    live = in_place(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.embed.weight_loader == "loads"  # type: ignore[attr-defined]
    assert (live.live, live.torn) == (None, False)
    write(live, "step-7", 7, 7.0)
    for tensor in (model.embed, model.head, model.scale, model.bias, model.columns):
        assert (tensor == 7).all()
    assert model.columns.shape == (4, 3)
    assert (model.product(torch.ones(1, 4)) == 28).all()
    assert live.flip(WANT) is None
    assert (live.live, live.torn) == (WANT, False)


def test_the_former_memory_is_given_back(model: Model) -> None:
    storage = model.embed.untyped_storage()
    in_place(model)
    assert torch._C._storage_Use_Count(storage._cdata) == 1, "this test's own"


def test_a_model_that_computes_with_a_reference_of_its_own_is_refused_and_stays_as_it_is(
    model: Model,
) -> None:
    weight = model.embed.data
    model.product = lambda x: x @ weight.t()
    address = model.embed.data_ptr()
    with pytest.raises(NotInPlace, match="beside the model's tensors computes with the memory of embed"):
        in_place(model)
    assert model.embed.data_ptr() == model.head.data_ptr() == address
    model.embed.fill_(3)
    assert (model.product(torch.ones(1, 4)) == 12).all()
    assert (model.columns == 3).all()


def test_a_tensor_that_reaches_beyond_what_is_written_is_refused_by_name(model: Model) -> None:
    resolved = resolved_of(model)
    resolved.views["embed"] = resolved.views["embed"][:5]
    with pytest.raises(NotInPlace, match="embed shares memory with embed and more"):
        InPlace(resolved, Slab.create(resolved.slab_bytes), model)


def test_weights_are_torn_from_the_first_byte_until_a_verified_version_is_live(model: Model) -> None:
    live = in_place(model)
    live.slab.begin_write()
    assert live.torn
    problem = live.flip(WANT)
    assert problem is not None
    assert problem.reason == "WeightsNotVerified"
    assert "nothing whole" in problem.message
    write(live, "step-6", 6, 6.0)
    assert live.torn, "verified, and nobody has decided"
    problem = live.flip(WANT)
    assert problem is not None
    assert "step-6 of round 6" in problem.message
    write(live, "step-7", 7, 7.0)
    assert live.flip(WANT) is None
    assert not live.torn


def test_a_repeated_flip_is_answered_as_the_first_and_not_once_something_was_written(model: Model) -> None:
    live = in_place(model)
    write(live, "step-7", 7, 7.0)
    assert live.flip(WANT) is None
    assert live.flip(WANT) is None
    live.slab.begin_write()
    assert live.torn
    assert live.flip(WANT) is not None
    write(live, "step-7", 7, 8.0)
    assert live.torn, "the same version again, of nobody's decision yet"


def test_a_parameter_that_somebody_moved_is_not_said_to_be_live(model: Model) -> None:
    live = in_place(model)
    write(live, "step-7", 7, 7.0)
    model.scale.data = model.scale.data.clone()
    problem = live.flip(WANT)
    assert problem is not None
    assert problem.reason == "FlipNotExact"
    assert "scale" in problem.message
    assert live.torn


def test_what_cannot_be_written_where_it_lies_is_refused_with_its_reason(model: Model) -> None:
    resolved = resolved_of(model)
    assert unfit(resolved) == ""
    shared = Resolved(resolved.manifest, 0, resolved.views, "", frozenset({"embed"}))
    assert "embed also holds" in unfit(shared)
    manifest = WorkerManifest({}, (), resolved.manifest.tensors, {}, fallback={"w": "it is quantised"})
    assert "w goes through vLLM's own loader, as it is quantised" in unfit(Resolved(manifest, 0, {}, ""))
    strided = Resolved(resolved.manifest, 0, {"embed": model.embed.data.t()}, "")
    assert "embed is not contiguous" in unfit(strided)
    assert "use WEIGHTSYNC_COMMIT=Staged" in unfit(strided)
