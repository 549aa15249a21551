"""etcd, API server and controller manager as processes of this host.

Flags of 1.20.2; https://kubernetes.io/docs/reference/command-line-tools-reference/ explains them.
"""

from __future__ import annotations

import secrets
import subprocess
import time
from pathlib import Path

import httpx

from tests.kube.api import KubeApi
from tests.kube.network import BRIDGE_ADDRESS

API_PORT, ETCD_PORT, ETCD_PEER_PORT, MANAGER_PORT = 6443, 2379, 2380, 10257
SERVICE_RANGE = "10.98.0.0/24"
START_S = 60.0


class ControlPlane:
    """Owns the three processes and their folder. Call `stop`."""

    def __init__(self, binaries: Path, folder: Path) -> None:
        self.folder = folder
        self.token = secrets.token_hex(16)
        self.url = f"https://{BRIDGE_ADDRESS}:{API_PORT}"
        self._binaries = binaries
        self._processes: list[subprocess.Popen[bytes]] = []
        folder.mkdir(parents=True, exist_ok=True)

    def start(self) -> KubeApi:
        """Start all three; returns a client with all rights once the API server is ready."""
        folder, key = self.folder, self.folder / "accounts.key"
        subprocess.run(["openssl", "genrsa", "-out", str(key), "2048"], check=True,
                       capture_output=True)  # fmt: skip
        tokens = folder / "tokens.csv"
        tokens.write_text(f'{self.token},admin,admin,"system:masters"\n')
        tokens.chmod(0o600)
        self._run(
            "etcd", "etcd",
            f"--data-dir={folder / 'etcd'}",
            f"--listen-client-urls=http://127.0.0.1:{ETCD_PORT}",
            f"--advertise-client-urls=http://127.0.0.1:{ETCD_PORT}",
            f"--listen-peer-urls=http://127.0.0.1:{ETCD_PEER_PORT}",
            "--unsafe-no-fsync",
        )  # fmt: skip
        self._run(
            "apiserver", str(self._binaries / "kube-apiserver"),
            f"--etcd-servers=http://127.0.0.1:{ETCD_PORT}",
            f"--bind-address={BRIDGE_ADDRESS}", f"--advertise-address={BRIDGE_ADDRESS}",
            f"--secure-port={API_PORT}", "--insecure-port=0", f"--cert-dir={folder / 'certs'}",
            f"--token-auth-file={tokens}", "--authorization-mode=RBAC",
            f"--service-cluster-ip-range={SERVICE_RANGE}",
            f"--service-account-key-file={key}", f"--service-account-signing-key-file={key}",
            "--service-account-issuer=https://kubernetes.default.svc",
            "--disable-admission-plugins=DefaultStorageClass,StorageObjectInUseProtection",
            "--allow-privileged=false",
        )  # fmt: skip
        api = KubeApi(self.url, self.token)
        self._wait(api)
        kubeconfig = self.write_kubeconfig()
        self._run(
            "controller-manager", str(self._binaries / "kube-controller-manager"),
            f"--kubeconfig={kubeconfig}", f"--service-account-private-key-file={key}",
            f"--root-ca-file={folder / 'certs' / 'apiserver.crt'}", "--leader-elect=false",
            "--bind-address=127.0.0.1", f"--secure-port={MANAGER_PORT}", "--port=0",
            f"--cert-dir={folder / 'manager-certs'}", "--use-service-account-credentials=false",
            "--controllers=*,-nodeipam,-route,-cloud-node-lifecycle,-service",
            "--node-monitor-grace-period=10m",
        )  # fmt: skip
        return api

    def write_kubeconfig(self) -> Path:
        """A kubeconfig with all rights, for Helm and the controller manager."""
        path = self.folder / "kubeconfig"
        path.write_text(
            "apiVersion: v1\nkind: Config\ncurrent-context: test\n"
            "clusters:\n- name: test\n  cluster:\n"
            f"    server: {self.url}\n    insecure-skip-tls-verify: true\n"
            "contexts:\n- name: test\n  context: {cluster: test, user: admin}\n"
            f"users:\n- name: admin\n  user: {{token: {self.token}}}\n"
        )
        path.chmod(0o600)
        return path

    def stop(self) -> None:
        """End all three, the last one first."""
        for process in reversed(self._processes):
            process.terminate()
        for process in reversed(self._processes):
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _run(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            self._processes.append(
                subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=self.folder)
            )

    def _wait(self, api: KubeApi) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            for process in self._processes:
                if process.poll() is not None:
                    raise RuntimeError(f"a process of the control plane ended: see {self.folder}")
            try:
                if api.is_ready():
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.2)
        raise RuntimeError(f"the API server did not become ready: see {self.folder}")
