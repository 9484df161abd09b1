"""The images that tests and the demo run: built from this machine's files, cached by what went into them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster import cache, oci
from tests.cluster.errors import ClusterError

REPOSITORY = Path(__file__).resolve().parents[2]
OPERATOR_UID = 65532
INSTALL_DEADLINE_S = 600.0
_RECIPE = 2  # raise it when the way an image is built changes
_UNUSED = ("test", "tests", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3", "site-packages")
_UNUSED_MODULES = re.compile(r"_(tkinter|test\w*|xxtestfuzz|xxsubinterpreters|ctypes_test)\.")


@dataclass(frozen=True)
class Image:
    """An image archive and the name that pods use; `imagePullPolicy` must be Never or IfNotPresent."""

    ref: str
    archive: Path


def host_env_image() -> Image:
    """An all but empty root, for pods that run this machine's Python (see `kind.host_python_volumes`)."""
    ref = f"localhost/weightsync-host-env:{_RECIPE}"

    def build(draft: Path) -> None:
        root = draft.with_name(draft.name + ".root")
        cache.remove(root)
        try:
            skeleton(root)
            for link in ("bin", "sbin", "lib", "lib64"):
                (root / link).symlink_to(f"usr/{link}")
            oci.pack(draft, ref, root)
        finally:
            cache.remove(root)

    return Image(ref, cache.entry("images", f"host-env-{_RECIPE}.tar", build))


def operator_image() -> Image:
    """The operator in an image of its own: a Python without its extras, the shared libraries, the package.

    It runs as user 65532 and writes nothing outside /tmp, so a read-only root is fine.
    """
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    ref = f"localhost/weightsync-operator:{project['version']}"
    sources = [REPOSITORY / "pyproject.toml", REPOSITORY / "README.md"]
    for package in ("operator", "engine"):
        sources += sorted(
            path
            for path in (REPOSITORY / package).rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        )
    inputs = [
        _RECIPE,
        sys.version,
        [(str(path.relative_to(REPOSITORY)), cache.digest(path.read_bytes().hex())) for path in sources],
    ]
    name = f"operator-{cache.digest(inputs)}"

    def build(draft: Path) -> None:
        root = draft.with_name(draft.name + ".root")
        cache.remove(root)
        try:
            skeleton(root)
            _copy_python(root)
            # Dependencies change rarely: they are a cache entry of their own.
            packages = root / "app"
            shutil.copytree(_dependencies(project), packages, symlinks=True)
            _install(packages, ["--no-deps", str(REPOSITORY)], name)
            _compile(packages)
            _add_libraries(root)
            oci.pack(
                draft,
                ref,
                root,
                entrypoint=["/usr/bin/python3", "-m", "weightsync_operator.main"],
                env={"PYTHONPATH": "/app", "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"},
                user=f"{OPERATOR_UID}:{OPERATOR_UID}",
            )
        finally:
            cache.remove(root)

    return Image(ref, cache.entry("images", f"{name}.tar", build))


def skeleton(root: Path) -> None:
    """The folders and the few files that every program expects of a root."""
    for name in ("dev", "etc", "home", "opt", "proc", "root", "run", "sys", "usr", "var", "tmp"):
        (root / name).mkdir(parents=True)
    (root / "tmp").chmod(0o1777)
    users = {"root": (0, "/root"), "user": (1000, "/tmp"), "nonroot": (OPERATOR_UID, "/tmp")}
    passwd = [f"{name}:x:{uid}:{uid}:{name}:{home}:/bin/sh" for name, (uid, home) in users.items()]
    (root / "etc/passwd").write_text("\n".join(passwd) + "\n")
    (root / "etc/group").write_text("".join(f"{name}:x:{uid}:\n" for name, (uid, _) in users.items()))
    (root / "etc/nsswitch.conf").write_text("hosts: files dns\n")


def libraries(programs: Iterable[Path], root: Path = Path("/")) -> list[Path]:
    """The shared libraries, by their paths inside `root`, that programs or libraries inside `root` load."""
    found: set[Path] = set()
    for program in programs:
        inside = "/" + str(program.relative_to(root))
        argv = ["ldd", inside] if root == Path("/") else ["chroot", str(root), "ldd", inside]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
        if "not found" in done.stdout:
            raise ClusterError(f"{program} needs libraries that are not here:\n{done.stdout}")
        found |= {Path(path) for path in re.findall(r"(?:=> |^\s)(/\S+) \(0x", done.stdout, re.MULTILINE)}
    return sorted(found)


def copy_libraries(names: Iterable[Path], source: Path, root: Path) -> None:
    """Copy libraries of the root `source` to the same paths in `root`, links followed."""
    for name in names:
        target = root / str(name)[1:]
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source / str(name)[1:], target)


def _copy_python(root: Path) -> None:
    """The interpreter of this environment without what a server never needs, under /usr."""
    base = Path(sys.base_prefix)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    standard = Path(sysconfig.get_path("stdlib", vars={"installed_base": str(base)}))

    def unused(folder: str, names: list[str]) -> set[str]:
        top = Path(folder) == standard
        return {
            name
            for name in names
            if name == "__pycache__"
            or name.endswith((".a", ".pyc"))
            or (top and (name in _UNUSED or name.startswith("config-")))
            or _UNUSED_MODULES.match(name)
        }

    target = root / "usr/lib" / version
    shutil.copytree(standard, target, ignore=unused)
    (root / "usr/bin").mkdir(parents=True)
    shutil.copy2(Path(sys.executable).resolve(), root / "usr/bin/python3")
    # A Python that was built with --enable-shared keeps itself in a library beside its base prefix.
    for library in (base / "lib").glob(f"lib{version}*.so*"):
        shutil.copy2(library, root / "usr/lib" / library.name, follow_symlinks=False)
    if strip := shutil.which("strip"):
        # Symbols are most of an interpreter that was built from source.
        for program in (root / "usr/bin/python3", *root.glob("usr/lib/lib*.so.*"), *target.rglob("*.so")):
            subprocess.run([strip, "--strip-unneeded", program], check=True, timeout=60)
    _compile(target)


def _dependencies(project: dict[str, Any]) -> Path:
    wanted = [*project["dependencies"], *project["optional-dependencies"]["operator"]]

    def build(draft: Path) -> None:
        draft.mkdir()
        _install(draft, wanted, "operator-dependencies")

    return cache.entry("images", f"packages-{cache.digest([_RECIPE, sys.version, wanted])}", build)


def _install(target: Path, wanted: Sequence[str], log_name: str) -> None:
    """Install packages into a folder, with uv when it is there, else with pip."""
    log = cache.log_path(log_name)
    log.write_text("")
    python = ["--python", sys.executable]
    argv = (
        ["uv", "pip", "install", *python] if shutil.which("uv") else [sys.executable, "-m", "pip", "install"]
    )
    cache.run(
        ["nice", *argv, "--target", target, *wanted],
        what=f"installing {' '.join(wanted)} (the Python package index must be reachable)",
        log=log,
        timeout=INSTALL_DEADLINE_S,
        # editable installs and caches of the caller's environment are none of this folder's business
        env={"UV_LINK_MODE": "copy", "PYTHONPATH": ""},
    )
    cache.remove(target / "bin")
    for leftover in (".lock", ".gitignore", "CACHEDIR.TAG"):
        cache.remove(target / leftover)
    for folder in list(target.rglob("direct_url.json")):
        folder.unlink()


def _compile(folder: Path) -> None:
    # Unchecked: the layer's time stamps are all zero, and a read-only root could not store them anew.
    argv = [sys.executable, "-m", "compileall", "-q", "-f", "--invalidation-mode", "unchecked-hash"]
    # -s and -p: tracebacks show the path inside the image
    inside = "/" + str(folder).partition(".root/")[2]
    subprocess.run(
        [*argv, "-s", str(folder), "-p", inside, str(folder)], check=True, timeout=INSTALL_DEADLINE_S
    )


def _add_libraries(root: Path) -> None:
    """Every library that the interpreter and the extension modules in `root` load, and the loader itself."""
    objects = [root / "usr/bin/python3", *root.rglob("*.so"), *root.glob("usr/lib/*.so*")]
    names: set[Path] = set()
    for item in objects:
        names |= set(libraries([item.absolute()]))
    own = str(Path(sys.base_prefix) / "lib")
    # name resolution is loaded at run time and seen by no ldd
    folder = next(iter(names)).parent
    for name in names:
        if name.name == "libc.so.6":
            folder = name.parent
    names |= {
        path
        for pattern in ("libnss_dns.so*", "libnss_files.so*", "libresolv.so*")
        for path in folder.glob(pattern)
    }
    copy_libraries([n for n in names if not str(n).startswith((own, str(root)))], Path("/"), root)
    certificates = Path("/etc/ssl/certs/ca-certificates.crt")
    if certificates.exists():
        (root / "etc/ssl/certs").mkdir(parents=True)
        shutil.copy2(certificates, root / "etc/ssl/certs/ca-certificates.crt")
