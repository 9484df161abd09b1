"""A real API server without a cluster: etcd and kube-apiserver as two processes on 127.0.0.1.

There are no nodes, no scheduler and no controllers: a test plays their part (`ApiServer.namespace`,
`ApiServer.pod`, `ApiServer.set_pod_status`), deleted namespaces stay, and owner references collect nothing.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import random
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from tests.cluster.binaries import binaries
from tests.cluster.errors import ClusterError

ISSUER = "https://kubernetes.default.svc.cluster.local"
START_DEADLINE_S = 60.0
STOP_DEADLINE_S = 15.0
_TETHER = Path(__file__).with_name("tether.py")


@dataclass(frozen=True)
class Credentials:
    """Paths of PEM files: who the API server must be, and who we are."""

    ca: Path
    cert: Path
    key: Path


class ApiServer:
    """A context manager: etcd and kube-apiserver run inside it, and end with it or with this process.

    RBAC is on, the usual admission plugins are on, and service account tokens work (`token`), with the
    public keys at `/openid/v1/jwks`. Every error says what is missing.
    """

    def __init__(self, *, extra_args: Sequence[str] = ()) -> None:
        """`extra_args` are appended to kube-apiserver's command line."""
        self._extra_args = list(extra_args)
        self._etcd: subprocess.Popen[bytes] | None = None
        self._server: subprocess.Popen[bytes] | None = None
        self._http: httpx.Client | None = None

    def __enter__(self) -> ApiServer:
        self._binaries = binaries("etcd", "kube-apiserver", "kubectl")
        self.folder = Path(tempfile.mkdtemp(prefix="weightsync-apiserver-"))
        try:
            self.port, self._etcd_port, self._etcd_peer_port = _free_ports(3)
            self.url = f"https://127.0.0.1:{self.port}"
            self.admin = _make_certificates(self.folder)
            self.kubeconfig = self.folder / "kubeconfig"
            self.write_kubeconfig(self.kubeconfig)
            self._start_etcd()
            self.start_server()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End both processes and remove every file; may be called twice."""
        self.stop_server()
        _end(self._etcd)
        self._etcd = None
        shutil.rmtree(self.folder, ignore_errors=True)

    def stop_server(self) -> None:
        """Stop kube-apiserver; etcd keeps the objects. Does nothing when it is not running."""
        if self._http is not None:
            self._http.close()
            self._http = None
        _end(self._server)
        self._server = None

    def start_server(self) -> None:
        """Start kube-apiserver (again, on the same port) and wait until it is ready."""
        if self._server is not None:
            raise ClusterError("the API server is running already; stop_server() first")
        files = self.folder
        self._server = self._spawn(
            "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{self._etcd_port}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            f"--secure-port={self.port}",
            f"--tls-cert-file={files}/server.crt",
            f"--tls-private-key-file={files}/server.key",
            f"--client-ca-file={files}/ca.crt",
            f"--service-account-issuer={ISSUER}",
            f"--service-account-key-file={files}/sa.pub",
            f"--service-account-signing-key-file={files}/sa.key",
            "--service-cluster-ip-range=10.96.0.0/16",
            "--authorization-mode=RBAC",
            # Nobody is there to be told of this server's address, and 127.0.0.1 could not be told.
            "--endpoint-reconciler-type=none",
            "--allow-privileged=true",
            "--profiling=false",
            *self._extra_args,
        )
        try:
            self._wait("kube-apiserver", self._server, self._server_ready)
        except BaseException:
            self.stop_server()
            raise

    @property
    def http(self) -> httpx.Client:
        """A client with the admin's rights whose paths are relative to the server's URL."""
        if self._http is None:
            context = ssl.create_default_context(cafile=str(self.admin.ca))
            context.load_cert_chain(self.admin.cert, self.admin.key)
            # trust_env: a proxy of the environment has no business between two local processes
            self._http = httpx.Client(base_url=self.url, verify=context, timeout=10, trust_env=False)
        return self._http

    def env(self) -> dict[str, str]:
        """The environment of a program that must find this server: this process' own plus KUBECONFIG."""
        return {**os.environ, "KUBECONFIG": str(self.kubeconfig)}

    def kubectl(self, *args: str, input: str | None = None, timeout: float = 60) -> str:
        """Run kubectl and return what it prints.

        Raises ClusterError with kubectl's own words when it fails or takes more than `timeout` seconds.
        """
        argv = [str(self._binaries["kubectl"]), "--kubeconfig", str(self.kubeconfig), *args]
        return run_tool(argv, input=input, timeout=timeout)

    def apply(self, *objects: Mapping[str, Any]) -> None:
        """Server-side apply of some objects."""
        self.kubectl("apply", "--server-side", "-f", "-", input=yaml.safe_dump_all(map(dict, objects)))

    def write_kubeconfig(self, path: Path, *, token: str | None = None, namespace: str = "default") -> Path:
        """Write a kubeconfig for the admin, or for the bearer of `token`, to `path`, and return that."""
        user: dict[str, str] = (
            {"token": token}
            if token is not None
            else {"client-certificate": str(self.admin.cert), "client-key": str(self.admin.key)}
        )
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {"name": "test", "cluster": {"server": self.url, "certificate-authority": str(self.admin.ca)}}
            ],
            "users": [{"name": "test", "user": user}],
            "contexts": [
                {"name": "test", "context": {"cluster": "test", "user": "test", "namespace": namespace}}
            ],
            "current-context": "test",
        }
        path.write_text(yaml.safe_dump(config))
        path.chmod(0o600)
        return path

    def token(
        self, namespace: str, account: str, audiences: Sequence[str] = (), *, seconds: int = 3600
    ) -> str:
        """A service account's token by TokenRequest; without audiences it is one for the API server."""
        answer = self.http.post(
            f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token",
            json={"spec": {"audiences": list(audiences), "expirationSeconds": seconds}},
        )
        _check(answer)
        token: str = answer.json()["status"]["token"]
        return token

    def namespace(self, name: str) -> str:
        """Create a namespace with its `default` service account, as the controllers of a cluster would."""
        _check(self.http.post("/api/v1/namespaces", json={"metadata": {"name": name}}))
        self.service_account(name, "default")
        return name

    def service_account(self, namespace: str, name: str) -> None:
        """Create a service account; one that is there already is left as it is."""
        answer = self.http.post(
            f"/api/v1/namespaces/{namespace}/serviceaccounts", json={"metadata": {"name": name}}
        )
        if answer.status_code != 409:
            _check(answer)

    def pod(self, namespace: str, name: str, *, node: str | None = "node", **spec: Any) -> dict[str, Any]:
        """Create a pod (bound to `node`, a name only) and return it.

        `spec` is merged over a minimal pod spec; the keys `labels` and `annotations` go to the metadata.
        """
        metadata = {
            "name": name,
            "labels": spec.pop("labels", {}),
            "annotations": spec.pop("annotations", {}),
        }
        body = {
            "metadata": metadata,
            "spec": {
                "containers": [{"name": "main", "image": "none"}],
                "automountServiceAccountToken": False,
                # No kubelet will end it: a deleted pod is to go at once.
                "terminationGracePeriodSeconds": 0,
                **({"nodeName": node} if node else {}),
                **spec,
            },
        }
        answer = self.http.post(f"/api/v1/namespaces/{namespace}/pods", json=body)
        return _check(answer)

    def set_pod_status(
        self,
        namespace: str,
        name: str,
        *,
        phase: str = "Running",
        ip: str | None = None,
        ready: bool | None = None,
        **status: Any,
    ) -> dict[str, Any]:
        """Patch a pod's status as its kubelet would, and return the pod; conditions of others stay."""
        body: dict[str, Any] = {"phase": phase, **status}
        if ip is not None:
            body |= {"podIP": ip, "podIPs": [{"ip": ip}]}
        if ready is not None:
            word = "True" if ready else "False"
            body["conditions"] = [
                {"type": kind, "status": word} for kind in ("ContainersReady", "Ready")
            ] + list(status.get("conditions", []))
        answer = self.http.patch(
            f"/api/v1/namespaces/{namespace}/pods/{name}/status",
            json={"status": body},
            headers={"Content-Type": "application/strategic-merge-patch+json"},
        )
        return _check(answer)

    def log_tail(self, lines: int = 20) -> str:
        """The last lines of kube-apiserver's log."""
        return "\n".join(
            (self.folder / "kube-apiserver.log").read_text(errors="replace").splitlines()[-lines:]
        )

    def _start_etcd(self) -> None:
        client, peer = (f"http://127.0.0.1:{port}" for port in (self._etcd_port, self._etcd_peer_port))
        self._etcd = self._spawn(
            "etcd",
            f"--data-dir={self.folder}/etcd",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--unsafe-no-fsync",
        )
        self._wait("etcd", self._etcd, lambda: _answers(client + "/health"))

    def _spawn(self, name: str, *args: str) -> subprocess.Popen[bytes]:
        tether = [sys.executable, "-I", "-S", str(_TETHER), str(os.getpid()), str(self.folder)]
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [*tether, str(self._binaries[name]), *args],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Ctrl-C in a terminal is for the test run, which then ends this in its own order.
                start_new_session=True,
            )

    def _server_ready(self) -> bool:
        try:
            return self.http.get("/readyz", timeout=2).status_code == 200
        except httpx.HTTPError:
            return False

    def _wait(self, name: str, process: subprocess.Popen[bytes], ready: Any) -> None:
        end = time.monotonic() + START_DEADLINE_S
        while not ready():
            log = "\n".join((self.folder / f"{name}.log").read_text(errors="replace").splitlines()[-15:])
            if process.poll() is not None:
                raise ClusterError(f"{name} ended with status {process.returncode}; its last lines:\n{log}")
            if time.monotonic() > end:
                raise ClusterError(
                    f"{name} was not ready after {START_DEADLINE_S:.0f} s; its last lines:\n{log}"
                )
            time.sleep(0.05)


def run_tool(
    argv: Sequence[str], *, input: str | None = None, timeout: float, env: Mapping[str, str] | None = None
) -> str:
    """Run a command and return its standard output.

    Raises ClusterError with what it wrote to standard error when it fails or takes over `timeout` seconds.
    """
    words = f"{Path(argv[0]).name} {' '.join(argv[1:])}"
    try:
        done = subprocess.run(
            argv,
            input=input,
            stdin=subprocess.DEVNULL if input is None else None,
            capture_output=True,
            text=True,
            timeout=timeout,
            env=None if env is None else dict(env),
        )
    except subprocess.TimeoutExpired:
        raise ClusterError(f"{words}: not done after {timeout:.0f} s") from None
    if done.returncode:
        raise ClusterError(f"{words}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def _end(process: subprocess.Popen[bytes] | None) -> None:
    """Kill a tethered command: a graceful end would wait for watches, and nothing here is worth one."""
    if process is None:
        return
    process.terminate()
    try:
        process.wait(STOP_DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def _check(answer: httpx.Response) -> dict[str, Any]:
    if answer.is_error:
        message = answer.json().get("message", answer.text) if answer.text.startswith("{") else answer.text
        raise ClusterError(f"{answer.request.method} {answer.request.url.path}: {message}")
    body: dict[str, Any] = answer.json()
    return body


def _free_ports(count: int) -> list[int]:
    """Free ports of 127.0.0.1, below the ephemeral range: no client takes one during a restart."""
    found: list[int] = []
    for port in random.sample(range(20000, 32000), 200):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise ClusterError("no free ports between 20000 and 32000 on 127.0.0.1")


def _make_certificates(folder: Path) -> Credentials:
    """Certificates of a new authority, the server and the admin, and the key that signs tokens."""
    now = datetime.datetime.now(datetime.UTC)
    ca_key = ec.generate_private_key(ec.SECP256R1())
    ca_name = _name("weightsync-test-ca")

    def issue(subject: x509.Name, key: Any, extensions: Sequence[tuple[x509.ExtensionType, bool]]) -> bytes:
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(ca_name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=30))
        )
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical)
        return builder.sign(ca_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def save_key(name: str, key: Any) -> None:
        path = folder / name
        path.touch(mode=0o600)
        path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.TraditionalOpenSSL,
                serialization.NoEncryption(),
            )
        )

    authority = [
        (x509.BasicConstraints(ca=True, path_length=None), True),
        (x509.KeyUsage(True, False, False, False, False, True, True, False, False), True),
        (x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key()), False),
    ]
    (folder / "ca.crt").write_bytes(issue(ca_name, ca_key, authority))
    names = [
        x509.DNSName("localhost"),
        x509.DNSName("kubernetes.default.svc"),
        x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
    ]
    leaves: list[tuple[str, x509.Name, list[tuple[x509.ExtensionType, bool]]]] = [
        (
            "server",
            _name("kube-apiserver"),
            [
                (x509.SubjectAlternativeName(names), False),
                (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False),
            ],
        ),
        (
            "admin",
            _name("admin", "system:masters"),
            [(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), False)],
        ),
    ]
    for file, subject, extensions in leaves:
        key = ec.generate_private_key(ec.SECP256R1())
        identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
        save_key(f"{file}.key", key)
        (folder / f"{file}.crt").write_bytes(issue(subject, key, [*extensions, (identifier, False)]))
    signer = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    save_key("sa.key", signer)
    (folder / "sa.pub").write_bytes(
        signer.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    return Credentials(folder / "ca.crt", folder / "admin.crt", folder / "admin.key")


def _name(common: str, group: str | None = None) -> x509.Name:
    parts = [x509.NameAttribute(NameOID.COMMON_NAME, common)]
    if group:
        parts.append(x509.NameAttribute(NameOID.ORGANIZATION_NAME, group))
    return x509.Name(parts)
