"""Pack a folder into an image archive without a registry or a container engine.

The archive is an OCI layout with Docker's `manifest.json` beside it: `kind load image-archive` and
`docker load` both take it. Equal input gives equal bytes.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_EPOCH = "1970-01-01T00:00:00Z"


def pack(
    out: Path,
    ref: str,
    root: Path,
    *,
    entrypoint: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    user: str = "",
    workdir: str = "/",
    stop_signal: str = "",
    keep_owners: bool = False,
) -> str:
    """Write the image `ref` with the content of `root` as its one layer to `out`; return its digest.

    Files belong to root unless `keep_owners`. The layer is not compressed: archives go to the same machine.
    """
    config: dict[str, Any] = {"Env": [f"{k}={v}" for k, v in {"PATH": PATH, **(env or {})}.items()]}
    config |= {"WorkingDir": workdir}
    config |= {"Entrypoint": list(entrypoint)} if entrypoint else {}
    config |= {"User": user} if user else {}
    config |= {"StopSignal": stop_signal} if stop_signal else {}
    target = {"architecture": _ARCHITECTURES.get(platform.machine(), platform.machine()), "os": "linux"}
    with tempfile.TemporaryFile(dir=out.parent) as layer, tarfile.open(out, "w") as archive:
        _write_layer(layer, root, keep_owners)
        size = layer.tell()
        layer.seek(0)
        layer_digest = hashlib.file_digest(layer, "sha256").hexdigest()
        layer.seek(0)
        _add(archive, f"blobs/sha256/{layer_digest}", layer, size)

        def blob(value: object, media_type: str) -> dict[str, Any]:
            data = json.dumps(value, sort_keys=True).encode()
            digest = hashlib.sha256(data).hexdigest()
            _add(archive, f"blobs/sha256/{digest}", io.BytesIO(data), len(data))
            return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data)}

        oci = "application/vnd.oci.image"
        image = {
            **target,
            "created": _EPOCH,
            "config": config,
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer_digest}"]},
            "history": [{"created": _EPOCH, "created_by": "weightsync tests.cluster.oci"}],
        }
        config_blob = blob(image, f"{oci}.config.v1+json")
        manifest = {
            "schemaVersion": 2,
            "mediaType": f"{oci}.manifest.v1+json",
            "config": config_blob,
            "layers": [
                {"mediaType": f"{oci}.layer.v1.tar", "digest": f"sha256:{layer_digest}", "size": size}
            ],
        }
        manifest_blob = blob(manifest, f"{oci}.manifest.v1+json") | {
            "platform": target,
            "annotations": {
                "io.containerd.image.name": ref,
                "org.opencontainers.image.ref.name": ref.rpartition(":")[2],
            },
        }
        files = {
            "oci-layout": {"imageLayoutVersion": "1.0.0"},
            "index.json": {
                "schemaVersion": 2,
                "mediaType": f"{oci}.index.v1+json",
                "manifests": [manifest_blob],
            },
            "manifest.json": [
                {
                    "Config": f"blobs/sha256/{config_blob['digest'].partition(':')[2]}",
                    "RepoTags": [ref],
                    "Layers": [f"blobs/sha256/{layer_digest}"],
                }
            ],
        }
        for name, value in files.items():
            data = json.dumps(value, sort_keys=True).encode()
            _add(archive, name, io.BytesIO(data), len(data))
    return str(manifest_blob["digest"])


def _add(archive: tarfile.TarFile, name: str, data: BinaryIO, size: int) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o644
    archive.addfile(info, data)


def _write_layer(out: BinaryIO, root: Path, keep_owners: bool) -> None:
    def normal(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.mtime = 0
        info.uname = info.gname = ""
        if not keep_owners:
            info.uid = info.gid = 0
        return info

    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as layer:
        # TarFile.add sorts below each folder itself
        for name in sorted(os.listdir(root)):
            layer.add(root / name, arcname=name, filter=normal)
