"""The cache and the image archives that test clusters are made from."""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path

import pytest
from tests.cluster import ClusterError, cache, oci


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTSYNC_CACHE", str(tmp_path / "cache"))


def test_a_build_that_was_cut_off_is_redone() -> None:
    def cut_off(draft: Path) -> None:
        draft.mkdir()
        (draft / "half").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.entry("things", "a-1", cut_off)

    def whole(draft: Path) -> None:
        draft.mkdir()
        (draft / "whole").touch()

    assert os.listdir(cache.entry("things", "a-1", whole)) == ["whole"]
    assert os.listdir(cache.entry("things", "a-1", cut_off)) == ["whole"]


def test_old_builds_of_the_same_thing_go() -> None:
    for number in range(cache.KEPT + 2):
        cache.entry("things", f"a-{number}", Path.touch)
    cache.entry("things", "b-0", Path.touch)
    kept = {path.name for path in cache.folder("things").iterdir()}
    assert kept == {"b-0", *(f"a-{number}" for number in range(2, cache.KEPT + 2))}


def test_a_held_lock_names_its_holder() -> None:
    with (
        cache.lock("x"),
        pytest.raises(ClusterError, match=f"process {os.getpid()}"),
        cache.lock("x", deadline_s=0),
    ):
        pass


def test_a_failed_step_shows_the_end_of_its_log(tmp_path: Path) -> None:
    log = tmp_path / "step.log"
    with pytest.raises(ClusterError, match=r"the step: exit status 3(.|\n)*step\.log(.|\n)*no such thing"):
        cache.run(["sh", "-c", "echo no such thing; exit 3"], what="the step", log=log, timeout=20)


def test_a_step_that_hangs_is_ended(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="not done after"):
        cache.run(["sh", "-c", "sleep 60 & wait"], what="the step", log=tmp_path / "log", timeout=0.2)


def test_equal_content_makes_equal_archives(tmp_path: Path) -> None:
    archives: list[bytes] = []
    for name in ("one", "two"):
        root = tmp_path / name
        (root / "bin").mkdir(parents=True)
        (root / "bin/tool").write_text("#!/bin/sh\n")
        (root / "sh").symlink_to("bin/tool")
        os.utime(root / "bin/tool", (1, len(archives)))
        out = tmp_path / f"{name}.tar"
        oci.pack(out, "localhost/tool:1", root, entrypoint=["/sh"], env={"A": "b"}, user="7")
        archives.append(out.read_bytes())
    assert archives[0] == archives[1]
    with tarfile.open(tmp_path / "one.tar") as archive:

        def read(name: str) -> bytes:
            file = archive.extractfile(name)
            assert file is not None
            return file.read()

        (image,) = json.loads(read("manifest.json"))
        config = json.loads(read(image["Config"]))["config"]
    assert image["RepoTags"] == ["localhost/tool:1"]
    assert config["Entrypoint"] == ["/sh"] and config["User"] == "7" and "A=b" in config["Env"]
