"""C27: a real vLLM worker that decodes speculatively with a draft model, which gets new weights with each version."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integration.vllm import serving, tiny
from tests.integration.vllm.test_worker import greedy, receive, rpc, worker
from tests.resolver.drafts import with_mtp

pytestmark = pytest.mark.timeout(1800)
TOKENS = 24


def copied(folder: Path, to: Path) -> Path:
    """A draft model that proposes just what the target would say: every token of it is accepted."""
    shutil.copytree(folder, to)
    return to


def accepted(llm: Any) -> tuple[int, int]:
    """(tokens proposed, tokens accepted) since the server began."""
    told = {metric.name: metric for metric in llm.get_metrics()}
    kinds = ("num_draft_tokens", "num_accepted_tokens")
    proposed, taken = (told[f"vllm:spec_decode_{kind}"].value for kind in kinds)
    return proposed, taken


def speculating(draft: Path) -> dict[str, Any]:
    said = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 2}
    return {"speculative_config": said, "disable_log_stats": False}


def test_target_and_draft_model_become_one_version_and_proposals_go_on_being_accepted(tmp_path: Path) -> None:
    first, second = (tiny.make_checkpoint(tmp_path / str(seed), seed, tied=True) for seed in (1, 2))
    drafts = {folder: copied(folder, tmp_path / f"draft-{folder.name}") for folder in (first, second)}
    wanted = {folder: tiny.Reference(folder).greedy(tiny.PROMPT, TOKENS) for folder in (first, second)}
    assert wanted[first] != wanted[second]
    with serving.in_process(first, **speculating(drafts[first])) as llm:
        assert rpc(llm, "weightsync_describe")["problem"] == {}
        manifest = worker(llm).weight_transfer_engine.resolved.manifest
        names = tiny.load(drafts[first]).keys() - {"lm_head.weight"}
        assert manifest.draft == {f"draft.{name}" for name in names}
        assert greedy(llm, tiny.PROMPT, TOKENS) == wanted[first]
        proposed, taken = accepted(llm)
        assert proposed > 0 and taken >= 0.9 * proposed
        for round_, folder in enumerate((second, first, second), start=1):
            receive(llm, folder, f"step-{round_}", round_, drafts[folder])
            answer = rpc(
                llm, "weightsync_flip", object_uid="uid", epoch=1, round=round_, version=f"step-{round_}"
            )
            assert (answer["version"], answer["torn"], answer["problem"]) == (f"step-{round_}", False, {})
            before = accepted(llm)
            assert greedy(llm, tiny.PROMPT, TOKENS) == wanted[folder]
            proposed, taken = (now - then for now, then in zip(accepted(llm), before, strict=True))
            assert proposed > 0 and taken >= 0.9 * proposed
        live = dict(worker(llm).get_draft_model().named_parameters())
        target = dict(worker(llm).get_model().named_parameters())
        assert live.keys() == target.keys()
        for name, parameter in live.items():
            assert torch.equal(parameter, target[name]) and parameter is not target[name], name


def test_the_layers_for_a_draft_model_in_the_targets_own_checkpoint_are_accepted_as_from_a_fresh_load(
    tmp_path: Path,
) -> None:
    """MTP of a mixture of experts: what is generated and how much of what is proposed is accepted is that of a server
    that loaded the new version; so are all tensors of both models."""
    first, second = (with_mtp(tmp_path / str(seed), seed, "Glm4MoeForCausalLM") for seed in (1, 2))
    said: dict[str, Any] = {
        "speculative_config": {"method": "mtp", "num_speculative_tokens": 1},
        "disable_log_stats": False,
    }

    def everything(llm: Any) -> dict[str, torch.Tensor]:
        models = {"": worker(llm).get_model(), "draft.": worker(llm).get_draft_model()}
        return {p + n: t.detach().clone() for p, model in models.items() for n, t in model.named_parameters()}

    with serving.in_process(second, **said) as llm:
        wanted, generated = everything(llm), greedy(llm, tiny.PROMPT, TOKENS)
        proposals = accepted(llm)
        assert proposals[0] > 0
    with serving.in_process(first, **said) as llm:
        assert rpc(llm, "weightsync_describe")["problem"] == {}
        assert worker(llm).weight_transfer_engine.resolved.manifest.draft
        assert greedy(llm, tiny.PROMPT, TOKENS) != generated
        receive(llm, second, "step-1", 1)
        answer = rpc(llm, "weightsync_flip", object_uid="uid", epoch=1, round=1, version="step-1")
        assert (answer["version"], answer["torn"], answer["problem"]) == ("step-1", False, {})
        before = accepted(llm)
        assert greedy(llm, tiny.PROMPT, TOKENS) == generated
        assert tuple(now - then for now, then in zip(accepted(llm), before, strict=True)) == proposals
        live = everything(llm)
    assert live.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(live[name], tensor), name


def test_a_frozen_draft_model_is_left_alone_and_its_proposals_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHTSYNC_DRAFT_MODEL", "frozen")
    first, second = (tiny.make_checkpoint(tmp_path / str(seed), seed, tied=True) for seed in (1, 2))
    wanted = tiny.Reference(second).greedy(tiny.PROMPT, TOKENS)
    with serving.in_process(first, **speculating(copied(first, tmp_path / "draft"))) as llm:
        assert rpc(llm, "weightsync_describe")["problem"] == {}
        manifest = worker(llm).weight_transfer_engine.resolved.manifest
        assert not any(name.startswith("draft.") for name in (*manifest.expected, *manifest.tensors))
        draft = worker(llm).get_draft_model()
        held = {name: parameter.detach().clone() for name, parameter in draft.named_parameters()}
        receive(llm, second, "step-1", 1)
        answer = rpc(llm, "weightsync_flip", object_uid="uid", epoch=1, round=1, version="step-1")
        assert (answer["version"], answer["problem"]) == ("step-1", {})
        assert all(torch.equal(held[name], parameter) for name, parameter in draft.named_parameters())
        before = accepted(llm)
        assert greedy(llm, tiny.PROMPT, TOKENS) == wanted
        proposed, taken = (now - then for now, then in zip(accepted(llm), before, strict=True))
        assert proposed > 0 and taken < 0.5 * proposed


NGRAM = """
import sys
from pathlib import Path
from tests.integration.vllm import serving
from tests.integration.vllm.test_worker import rpc, worker

said = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
with serving.in_process(Path(sys.argv[1]), speculative_config=said) as llm:
    assert rpc(llm, "weightsync_describe")["problem"] == {}
    assert worker(llm).weight_transfer_engine.resolved.manifest.draft == frozenset()
print("served")
"""


def test_proposals_without_a_model_need_no_weights(tmp_path: Path) -> None:
    """In a process of its own: once numba is loaded, as ngram does, vLLM 0.32 loads no second model in a process (its
    search for kernels stumbles over llvmlite's objects)."""
    folder = tiny.make_checkpoint(tmp_path / "1", 1, tied=True)
    done = subprocess.run(
        [sys.executable, "-c", NGRAM, str(folder)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "served"
