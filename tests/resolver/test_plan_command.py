"""`weightsync plan` on the configurations of real architectures, by vLLM's and transformers' own models."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.resolver.models import ARCHITECTURES, Architecture

from weightsync_engine.cli.main import main


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Only config.json of a tiny model."""
    import transformers

    architecture: Architecture = getattr(request, "param", ARCHITECTURES[0])
    config = getattr(transformers, architecture.config)(**architecture.values)
    config.architectures = [architecture.name]
    config.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("folder", "architecture"),
    [(a, a) for a in ARCHITECTURES],
    ids=lambda a: getattr(a, "title", ""),
    indirect=["folder"],
)
def test_every_architecture_is_planned_from_its_configuration_alone(
    folder: Path, architecture: Architecture, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(
        ["plan", str(folder), "--trainer", "replicate=2,fsdp=2", "--server", "tp=2,count=2", "--json"]
    )
    told = capsys.readouterr()
    assert told.out, told.err
    found = json.loads(told.out)
    assert status == 0, found["parameters"]["refused"]
    by_loader = found["parameters"]["by_loader"]
    for name, reason in by_loader.items():
        assert any(
            re.fullmatch(p, name) and re.search(w, reason) for p, w in architecture.by_loader.items()
        ), name
    for pattern in architecture.by_loader:
        assert any(re.fullmatch(pattern, name) for name in by_loader), pattern
    assert (found["bytes"]["direct_share"] == 1.0) == (not by_loader)
    assert found["bytes"]["direct_share"] + found["bytes"]["loader_share"] == pytest.approx(1.0)
    assert len(found["by_rank"]) == 4 + 4 and found["steps"] > 0
    sent = [r["bytes_sent"] for r in found["by_rank"][:4]]
    assert max(sent) <= 1.2 * sum(sent) / 4


@pytest.mark.parametrize("folder", [a for a in ARCHITECTURES if a.name == "GptOssForCausalLM"], indirect=True)
def test_what_goes_through_vllms_loader_is_told_with_its_reason_and_is_no_failure(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(folder), "--trainer", "fsdp=4", "--server", "tp=2,ep"]) == 0
    told = capsys.readouterr().out
    assert "8 by vLLM's loader (63." in told
    assert "model.layers.0.mlp.experts.down_proj and 7 more: its experts are loaded by GptOss" in told
    assert "refused" not in told


def test_a_person_reads_ranks_bytes_and_memory(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(folder / "config.json"), "--trainer", "fsdp=4", "--server", "tp=2"]) == 0
    told = capsys.readouterr().out
    for words in (
        "FSDP 4: 4 ranks",
        "1 x TP 2 (2 workers)",
        "100.0%",
        "snapshot",
        "shadow",
        "staging",
        "a link",
    ):
        assert words in told


def test_a_table_of_parameters_stands_in_for_transformers(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "table.json"
    table.write_text(json.dumps({"lm_head.weight": {"shape": [1000, 256], "dtype": "float32"}}))
    assert main(["plan", str(folder), "--trainer", "fsdp=4", "--table", str(table)]) == 1
    assert "no parameter of the checkpoint maps to model.embed_tokens.weight" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere", "--trainer", "fsdp=4"], "there is no config.json"),
        (["FOLDER", "--trainer", "fsdp"], "such as fsdp=8"),
        (["FOLDER", "--trainer", "fsdp=4", "--server", "cp=2"], "expected tp=N"),
        (["FOLDER", "--trainer", "fsdp=4", "--server", "tp=3"], "vLLM cannot build worker"),
        (["FOLDER", "--trainer", "fsdp=4", "--table", "FOLDER/none.json"], "--table"),
        (["FOLDER", "--trainer", "fsdp=4", "--dtype", "float3"], "float3"),
    ],
)
def test_wrong_input_names_the_argument_and_the_fix(
    folder: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *(a.replace("FOLDER", str(folder)) for a in arguments)]) == 2
    assert words in capsys.readouterr().err
