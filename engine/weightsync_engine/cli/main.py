"""`weightsync plan`: how the weights of a model would travel, before asking for GPUs. `weightsync doctor`: what a
person would paste into a bug report."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import math
import os
import shutil
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..layout.tensors import DTYPE_BYTES, WorkerManifest
from ..plan.compile import compile_plan
from ..plan.groups import Worker
from ..plan.steps import PlanError
from .mesh import DIMENSIONS, MAX_RANKS, MeshError, parse_mesh, sources, whole_number
from .report import Server, report, size, text

if TYPE_CHECKING:
    from ..resolve.offline import Parallel

MAX_BYTES = 1 << 46
"""Of a model: a few times what any has."""
USAGE = 2
REFUSED = 1


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """So many servers of one kind."""

    tensor: int = 1
    pipeline: int = 1
    experts: bool = False
    data: int = 1
    count: int = 1


def parse_server(given: str) -> ServerSpec:
    """`tp=8`, `tp=8,ep,count=4`, `tp=2,pp=2`, `dp=8,ep`. Raises `MeshError`."""
    fields = {"tp": "tensor", "pp": "pipeline", "dp": "data", "count": "count"}
    values: dict[str, int | bool] = {}
    for part in given.split(","):
        name, equals, number = part.strip().partition("=")
        if name == "ep" and not equals:
            if "experts" in values:
                raise MeshError("'ep' is given twice")
            values["experts"] = True
        elif name not in fields:
            raise MeshError(
                f"{part.strip()[:40]!r}: expected tp=N, pp=N, dp=N, count=N or ep, such as tp=8,ep,count=4"
            )
        elif (value := whole_number(number)) is None:
            raise MeshError(f"{part.strip()[:40]!r}: the number must be a whole one of at least 1")
        elif fields[name] in values:
            raise MeshError(f"{name!r} is given twice")
        else:
            values[fields[name]] = value
    spec = ServerSpec(**values)  # type: ignore[arg-type]
    if (workers := spec.tensor * spec.pipeline * spec.data * spec.count) > MAX_RANKS:
        raise MeshError(f"{given!r} has {workers} workers: at most {MAX_RANKS} can be planned")
    return spec


@contextlib.contextmanager
def _argument(name: str) -> Iterator[None]:
    """What is wrong inside is wrong with this argument."""
    try:
        yield
    except MeshError as e:
        raise MeshError(f"{name}: {e}") from e


DTYPES = {"auto": None, "half": "float16", "float": "float32"} | {
    name: name for name in ("float16", "bfloat16", "float32")
}
"""vLLM's words for them -> ours; None: the model's own."""


def parse_dtype(given: str | None) -> str | None:
    """Raises `MeshError`."""
    if given is not None and given not in DTYPES:
        raise MeshError(f"--dtype: {given!r} is none of {', '.join(DTYPES)}")
    return DTYPES[given or "auto"]


def parse_speculative(given: str | None) -> dict[str, Any] | None:
    """Raises `MeshError`."""
    if given is None:
        return None
    try:
        said = json.loads(given)
    except ValueError as e:
        raise MeshError(f"--speculative-config: {e}") from e
    if not isinstance(said, dict) or not said:
        raise MeshError(
            '--speculative-config: expected an object, such as {"method": "mtp", "num_speculative_tokens": 1}'
        )
    return said


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 1 if servers would refuse the plan or the doctor found something, or 2 for wrong input."""
    options = _parser().parse_args(arguments)
    return int(options.run(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="weightsync", description="Weights from RL trainers to vLLM.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    plan = commands.add_parser(
        "plan",
        help="how the weights of a model would travel; needs no GPU, no weights and no cluster",
        description="How the weights of a model would travel from a trainer to vLLM servers: bytes, steps, memory, "
        "what goes through vLLM's own loader, and what is refused. Needs vLLM and transformers installed, no GPU and "
        "no weights.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="trainer meshes, outermost dimension first:\n"
        + "\n".join(f"  {name:10} {what}" for name, what in DIMENSIONS.items())
        + "\n\nexample:\n  weightsync plan Qwen3-235B-A22B --trainer fsdp=64 --server tp=8,ep,count=4",
    )
    plan.add_argument("model", type=Path, help="folder with the model's config.json, or that file")
    plan.add_argument("--trainer", required=True, metavar="MESH", help="such as fsdp=64 or pp=8,ep=32,fsdp=4")
    plan.add_argument(
        "--server",
        action="append",
        metavar="SPEC",
        help="such as tp=8 or tp=8,ep,count=4; repeat it for servers of another kind (default: tp=1)",
    )
    plan.add_argument(
        "--table",
        type=Path,
        metavar="FILE",
        help='checkpoint parameters that the trainer sends, as JSON {"name": {"shape": [..], "dtype": ".."}}; '
        "default: what transformers builds from the configuration",
    )
    plan.add_argument(
        "--dtype", help="in which servers hold the weights (vLLM's --dtype; default: the model's)"
    )
    plan.add_argument(
        "--speculative-config",
        metavar="JSON",
        help="vLLM's: how the servers decode speculatively; their draft model is planned too (leave it out if the "
        "draft model is to keep its weights)",
    )
    plan.add_argument("--json", action="store_true", help="everything, with each rank's share")
    plan.set_defaults(run=_plan)
    _add_doctor(commands)
    return parser


def _add_doctor(commands: Any) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="what a bug report needs: of an object in a cluster, by kubectl; or of this pod, without a name",
        description="Collects what a bug report needs, and says first what is not as it should be. With a name: the "
        "WeightSync object, its pods, their agents and logs, the operator, by kubectl. Without one: what can be seen "
        "inside this pod. Secrets are left out, but read it before you share it. Exit status: 0, or 1 if something "
        "is wrong or could not be collected, or 2 for wrong input.",
    )
    doctor.add_argument("name", nargs="?", help="of the WeightSync object; without it: this pod, from within")
    doctor.add_argument("-n", "--namespace", default="default", help="of the object; default: %(default)s")
    doctor.add_argument("--context", help="of kubectl")
    doctor.add_argument("--kubeconfig", help="of kubectl")
    doctor.add_argument("--operator-namespace", default="weightsync-system", help="default: %(default)s")
    doctor.add_argument(
        "--output", type=Path, metavar="FILE", help="write it there; default: standard output"
    )
    doctor.add_argument(
        "--tail", type=int, default=200, metavar="LINES", help="of each log; default: %(default)s"
    )
    doctor.add_argument(
        "--pods", type=int, default=16, help="whose logs are read, at most; default: %(default)s"
    )
    doctor.add_argument(
        "--timeout", type=float, default=20.0, metavar="S", help="of each look; default: %(default)s"
    )
    doctor.add_argument("--port", type=int, help="inside a pod: where its agent listens")
    doctor.add_argument("--no-exec", action="store_true", help="do not look inside the pods by kubectl exec")
    doctor.set_defaults(run=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    from .bugreport import render

    if options.timeout <= 0 or options.tail < 0 or options.pods < 0:
        print("weightsync doctor: --timeout must be above 0, --tail and --pods not below", file=sys.stderr)
        return USAGE
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    if options.name is None:
        from .inside import inside

        title = f"weightsync doctor inside {socket.gethostname()}, {now}"
        sections = inside(options.timeout, options.port)
    else:
        from .doctor import Target, collect

        kubectl = shutil.which("kubectl")
        if kubectl is None:
            print(
                "weightsync doctor: there is no kubectl in PATH; run it where kubectl is, or without a name inside "
                "a pod",
                file=sys.stderr,
            )
            return USAGE
        flags = [
            f"--{what}={value}" for what in ("context", "kubeconfig") if (value := getattr(options, what))
        ]
        sections = collect(
            Target(
                options.name,
                options.namespace,
                kubectl=kubectl,
                flags=tuple(flags),
                operator_namespace=options.operator_namespace,
                seconds=options.timeout,
                tail=options.tail,
                pods=options.pods,
                look_inside=not options.no_exec,
            )
        )
        title = f"weightsync doctor of {options.namespace}/{options.name}, {now}"
    text = render(title, sections)
    found = sum(len(section.findings) for section in sections)
    if options.output is None:
        print(text)
    else:
        try:
            options.output.write_text(text + "\n")
        except OSError as e:
            print(f"weightsync doctor: cannot write {options.output}: {e.strerror}", file=sys.stderr)
            return USAGE
        print(f"{options.output}: {found} findings; read it before you share it", file=sys.stderr)
    return REFUSED if found else 0


def _plan(options: argparse.Namespace) -> int:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # read when vLLM is imported
    from . import models  # torch, transformers and vLLM: not for --help

    try:
        folder = options.model.parent if options.model.name == "config.json" else options.model
        if not (folder / "config.json").is_file():
            raise models.ModelError(
                f"{options.model}: there is no config.json; give the folder of a Hugging Face model, or that file"
            )
        models.check_config(folder)
        with _argument("--trainer"):
            mesh = parse_mesh(options.trainer)
        with _argument("--server"):
            specs = [parse_server(s) for s in options.server or ["tp=1"]]
        dtype = parse_dtype(options.dtype)
        speculative = parse_speculative(options.speculative_config)
        build = models.table_model if options.table else models.trainer_model
        model = build(options.table or folder)
        if (held := sum(math.prod(t.shape) * DTYPE_BYTES[t.dtype] for t in model.tensors)) > MAX_BYTES:
            raise models.ModelError(
                f"{options.table or folder}: parameters of {size(held)} in all, more than the {size(MAX_BYTES)} "
                "that can be planned; look for a size that is wrong"
            )
        shapes = {r.name: r.shape for t in model.tensors for r in t.regions}
        kinds = [(s, _manifests(folder, s, dtype, shapes, speculative)) for s in specs]
        tensors = models.with_wire_dtypes(model.tensors, tuple(m for _, ms in kinds for m in ms))
        with _argument("--trainer"):
            sent = sources(tensors, mesh)
        reasons = {n: why for _, ms in kinds for m in ms for n, why in m.unresolved.items()} | model.refused
        if reasons:  # live tensors go by vLLM's names, so what would fill them is known by nobody
            known = {n for _, ms in kinds for m in ms for n in (*m.expected, *m.aliases)} | reasons.keys()
            why = "the servers could not resolve the live tensor that it belongs to"
            reasons |= {s.name: why for s in sent if s.name not in known}
        kept = tuple(s for s in sent if s.name not in reasons)
        lost = sum(math.prod(s.shape) * DTYPE_BYTES[s.dtype] for s in sent if s.name in reasons)
        workers, servers, rank = list[Worker](), list[Server](), mesh.ranks
        for spec, manifests in kinds:
            usable = [_without(m, reasons, {s.name for s in kept}) for m in manifests]
            for number in range(spec.count):
                for manifest in usable:
                    workers.append(Worker(rank, f"{_title(spec)} server {number}", manifest))
                    rank += 1
            live = tuple(_live_bytes(m) for m in manifests)
            servers.append(Server(_title(spec), spec.count, len(manifests), live))
        plan = compile_plan(kept, workers, mesh.ranks)
    except (MeshError, models.ModelError) as e:
        print(f"weightsync plan: {e}", file=sys.stderr)
        return USAGE
    except PlanError as e:
        print(f"weightsync plan: {e.problem.reason}: {e.problem.message}", file=sys.stderr)
        return REFUSED
    found = report(plan, kept, str(mesh), servers, reasons, lost + model.refused_bytes)
    print(json.dumps(found, indent=1) if options.json else text(found))
    return REFUSED if reasons else 0


def _manifests(
    folder: Path,
    spec: ServerSpec,
    dtype: str | None,
    shapes: dict[str, tuple[int, ...]],
    speculative: dict[str, Any] | None,
) -> tuple[WorkerManifest, ...]:
    from ..resolve.offline import Parallel
    from . import models

    parallel: Parallel = Parallel(spec.tensor, spec.pipeline, spec.experts, spec.data)
    try:
        return models.server_manifests(folder, parallel, dtype, shapes, speculative)
    except models.ModelError as e:
        raise models.ModelError(f"--server {_title(spec)}: {e}") from e


def _title(spec: ServerSpec) -> str:
    stages = f" x PP {spec.pipeline}" if spec.pipeline > 1 else ""
    engines = f" x DP {spec.data}" if spec.data > 1 else ""
    return f"TP {spec.tensor}{stages}{engines}{' EP' if spec.experts else ''}"


def _without(manifest: WorkerManifest, reasons: dict[str, str], sent: set[str]) -> WorkerManifest:
    """The manifest without what is refused, so that the rest can be planned and shown."""
    gone = {n for n in reasons if n not in sent}
    return replace(
        manifest,
        expected={n: e for n, e in manifest.expected.items() if n not in gone},
        pieces=tuple(p for p in manifest.pieces if p.name not in gone),
        unresolved={},
    )


def _live_bytes(manifest: WorkerManifest) -> int:
    return sum(math.prod(t.shape) * DTYPE_BYTES[t.dtype] for t in manifest.tensors.values())
