"""`weightsync plan` on the configurations of real architectures, by vLLM's and transformers' own models."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.resolver.drafts import LAYERS, with_mtp
from tests.resolver.matrix import load
from tests.resolver.models import ARCHITECTURES, Architecture

from weightsync_engine.cli.main import main
from weightsync_engine.cli.report import text


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


def table_of(folder: Path, **changed: str) -> str:
    """The parameters of a checkpoint as `--table` takes them, those with an ending in `changed` in another dtype."""
    entries = {
        name: {
            "shape": list(tensor.shape),
            "dtype": next((d for end, d in changed.items() if name.endswith(end)), "bfloat16"),
        }
        for name, tensor in load(folder).items()
    }
    file = folder / "table.json"
    file.write_text(json.dumps(entries))
    return str(file)


def test_a_parameter_that_the_trainer_computes_wider_than_the_rest_is_named_where_servers_round_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # C16
    folder = ARCHITECTURES[0].make(tmp_path / "model", 1)
    arguments = ["plan", str(folder), "--trainer", "fsdp=2", "--dtype"]
    assert main([*arguments, "bfloat16", "--table", table_of(folder)]) == 0
    assert "rounded" not in capsys.readouterr().out
    table = table_of(folder, **{"model.norm.weight": "float32"})
    # `--dtype` is the servers'; a table says itself what the trainer computes with.
    assert main([*arguments, "bfloat16", "--table", table]) == 0
    told = capsys.readouterr().out
    assert "1 rounded on the way" in told and "model.norm.weight (float32 to bfloat16)" in told
    assert main([*arguments, "bfloat16", "--table", table, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"]["rounded"] == {"model.norm.weight": ["float32", "bfloat16"]}


MTP = json.dumps({"method": "mtp", "num_speculative_tokens": 1})


def test_a_draft_model_is_planned_with_the_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # C27
    folder = with_mtp(tmp_path / "model", 1)
    arguments = [
        "plan",
        str(folder),
        "--trainer",
        "fsdp=2",
        "--server",
        "tp=2",
        "--json",
        "--table",
        table_of(folder),
    ]
    found = []
    for more in ([], ["--speculative-config", MTP]):
        assert main([*arguments, *more]) == 0
        found.append(json.loads(capsys.readouterr().out))
    alone, both = (f["parameters"] for f in found)
    draft = {name for name in load(folder) if name.startswith(f"model.layers.{LAYERS}.")}
    copies = {f"model.layers.{LAYERS}.embed_tokens.weight", f"model.layers.{LAYERS}.shared_head.head.weight"}
    assert (set(alone["unused"]), alone["draft"]) == (draft, [])
    assert (set(both["unused"]), set(both["draft"])) == (copies, draft - copies)
    shadows = [f["workers"]["shadow_bytes"]["most"] for f in found]
    assert shadows[1] > shadows[0]
    assert main([a for a in arguments if a != "--json"] + ["--speculative-config", MTP]) == 0
    assert f"{len(draft - copies)} for draft models alone" in capsys.readouterr().out


def test_a_draft_model_that_the_trainers_model_lacks_is_refused_with_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # C27
    folder = with_mtp(tmp_path / "model", 1)
    assert main(["plan", str(folder), "--trainer", "fsdp=2", "--speculative-config", MTP]) == 1
    told = capsys.readouterr().out
    assert "draft model" in told and "WEIGHTSYNC_DRAFT_MODEL=frozen" in told and "--table" in told


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["FOLDER", "--trainer", "fsdp=4", "--speculative-config", "{"], "--speculative-config: "),
        (["FOLDER", "--trainer", "fsdp=4", "--speculative-config", "[]"], "expected an object, such as"),
        (
            ["FOLDER", "--trainer", "fsdp=4", "--speculative-config", '{"method": "mtp"}'],
            "--server TP 1: vLLM cannot build worker 0",
        ),
        (["nowhere", "--trainer", "fsdp=4"], "there is no config.json"),
        (
            ["FOLDER", "--trainer", "fsdp"],
            "--trainer: 'fsdp': the size must be a whole number of at least 1, such as",
        ),
        (["FOLDER", "--trainer", "fsdp=4", "--server", "cp=2"], "--server: 'cp=2': expected tp=N"),
        (["FOLDER", "--trainer", "fsdp=4", "--server", "tp=3"], "--server TP 3: vLLM cannot build worker 0"),
        (
            ["FOLDER", "--trainer", "fsdp=4", "--server", "tp=3"],
            "heads (8) must be divisible by tensor parallel",
        ),
        (["FOLDER", "--trainer", "fsdp=4", "--server", "tp=2,ep"], "--server TP 2 EP: vLLM cannot build"),
        (["FOLDER", "--trainer", "fsdp=4", "--server", "count=70000"], "70000 workers: at most 65536"),
        (["FOLDER", "--trainer", "fsdp=4", "--table", "FOLDER/none.json"], "--table"),
        (["FOLDER", "--trainer", "fsdp=4", "--dtype", "bf16"], "--dtype: 'bf16' is none of auto, half"),
    ],
)
def test_wrong_input_names_the_argument_and_the_fix(
    folder: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *(a.replace("FOLDER", str(folder)) for a in arguments)]) == 2
    told = capsys.readouterr().err
    assert words in told
    assert "pydantic" not in told and "Traceback" not in told


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_key_value_heads": 3}, "3 KV heads over 4 ranks: neither number divides the other"),
        ({"architectures": ["Nope"]}, "['Nope'] are not supported"),
        ({"model_type": "nope"}, "nope"),
        ({"hidden_size": "x"}, "'hidden_size' expected int"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised checkpoint (quantization_config: fp8)"),
        ("[1]", "expected an object"),
        ("{", "cannot be read"),
    ],
)
def test_a_configuration_that_no_server_could_have_is_told_with_what_is_wrong(
    folder: Path, change: dict[str, object] | str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # C01: 3 KV heads with tp 4, both numbers
    file = folder / "config.json"
    file.write_text(change if isinstance(change, str) else json.dumps(json.loads(file.read_text()) | change))
    assert main(["plan", str(folder), "--trainer", "fsdp=4", "--server", "tp=4"]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("", "--table"),
        ("[1]", "expected an object"),
        ('{"a": null}', "'a' has no \"shape\""),
        ('{"a": {"shape": [true, 2]}}', "'a' has no \"shape\""),
        ('{"a": {"shape": [-1]}}', "'a' has no \"shape\""),
        ('{"a": {"shape": [2], "dtype": ["x"]}}', "'a' has dtype ['x']; known"),
        ('{"a": {"shape": [1099511627776, 1099511627776]}}', "look for a size that is wrong"),
    ],
)
def test_a_wrong_table_names_the_entry(
    folder: Path, tmp_path: Path, table: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "given.json"
    file.write_text(table)
    assert main(["plan", str(folder), "--trainer", "fsdp=4", "--table", str(file)]) == 2
    assert words in capsys.readouterr().err


def test_the_operators_condition_has_the_words_of_the_command(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from dataclasses import replace

    from tests.unit.control.builders import Sim
    from tests.unit.control.test_status import shown

    from weightsync_engine.protocol.messages import PlanSummary

    summary = PlanSummary(
        digest="d",
        parameters=21,
        direct=20,
        fallback=1,
        unused=1,
        bytes_total=2_600_000,
        steps=3,
        draft=2,
        rounded=5,
        first_rounded=tuple(f"{n} (float32 to bfloat16)" for n in "cdef"),
    )
    sim = Sim()
    sim.run(lambda: sim.memory.epoch is not None and sim.memory.epoch.joined)
    assert sim.memory.epoch is not None
    sim.memory = replace(sim.memory, epoch=replace(sim.memory.epoch, plan=summary))
    (said,) = (item.message for item in shown(sim).conditions if item.type == "PlanResolved")
    found = {
        "trainer": {"mesh": "FSDP 1", "ranks": 1}, "servers": [], "steps": 3, "digest": "d",
        "parameters": {"all": 22, "direct": 20, "by_loader": {"a": "why"}, "unused": ["b"], "refused": {}, "tied": {},
                       "draft": ["x", "y"], "rounded": dict.fromkeys("cdefg", ("float32", "bfloat16"))},
        "bytes": {"model": 1, "direct_share": 0.9, "loader_share": 0.1, "received_by_all": 2_600_000},
    }  # fmt: skip
    none = {"count": 0, "least": 0, "mean": 0, "most": 0}
    side = {
        "bytes_sent": none,
        "bytes_received": none,
        "steps": none,
        "snapshot_bytes": none,
        "shadow_bytes": none,
    }
    rest = {
        "links": none,
        "trainer_ranks": side | {"staging_bytes": none},
        "workers": side | {"staging_bytes": none},
    }
    told = text(found | rest)
    for words in (
        "20 direct", "1 by vLLM's loader", "2 for draft models alone", "1 not sent: vLLM has no use for them",
        "3 steps",
        "5 rounded on the way, with fewer bits in the servers than the trainer computes with: "
        "c (float32 to bfloat16), d (float32 to bfloat16), e (float32 to bfloat16), f (float32 to bfloat16) and 1 more",
    ):  # fmt: skip
        assert words in told and words in said, words
