"""The generated CRD."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, Field

from weightsync_operator.api import crd


def test_the_files_in_the_repository_are_fresh(capsys: pytest.CaptureFixture[str]) -> None:
    assert crd.main(["--check"]) == 0, capsys.readouterr().err


def test_a_stale_file_fails_the_check_and_writing_mends_it(tmp_path: Path) -> None:
    assert crd.main(["--check", "--root", str(tmp_path)]) == 1
    assert crd.main(["--root", str(tmp_path)]) == 0
    assert crd.main(["--check", "--root", str(tmp_path)]) == 0
    (tmp_path / crd.TARGETS[0]).write_text("old")
    assert crd.main(["--check", "--root", str(tmp_path)]) == 1


def nodes(schema: dict[str, Any]) -> list[dict[str, Any]]:
    found = [schema]
    for child in schema.get("properties", {}).values():
        found += nodes(child)
    if "items" in schema:
        found += nodes(schema["items"])
    return found


def test_the_schema_is_structural_and_bounded() -> None:
    version = crd.custom_resource_definition()["spec"]["versions"][0]
    root = version["schema"]["openAPIV3Schema"]["properties"]
    for node in nodes(root["spec"]) + nodes(root["status"]):
        assert not {"$ref", "$defs", "anyOf", "title", "default", "const", "discriminator"} & set(node)
        if node["type"] == "string":
            assert "maxLength" in node or "enum" in node
        if node["type"] == "array":
            assert "maxItems" in node


def test_rules_stand_below_spec_but_for_the_name() -> None:
    schema = crd.custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    assert [rule["rule"] for rule in schema["x-kubernetes-validations"]] == [
        "self.metadata.name.size() <= 63"
    ]
    for node in nodes(schema["properties"]["spec"]):
        for rule in node.get("x-kubernetes-validations", ()):
            assert rule["message"]


class Unbounded(BaseModel):
    text: str


class Union(BaseModel):
    either: Annotated[int | bool, Field()]


@pytest.mark.parametrize("model", [Unbounded, Union])
def test_what_a_crd_cannot_say_is_refused_when_generating(model: type[BaseModel]) -> None:
    with pytest.raises(ValueError, match=r"maxLength|union"):
        crd.structural(model.model_json_schema())
