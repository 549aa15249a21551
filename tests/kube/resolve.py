"""A pod's containers with every reference resolved: images, variables, volumes.

Reads Secrets and ConfigMaps, and writes volumes into the pod's folder.
"""

from __future__ import annotations

import base64
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.kube.api import Json, KubeApi
from tests.kube.container import KERNELS, ContainerSpec, Mount

PATH = f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class NotYet(Exception):
    """Something that the pod needs does not exist (yet)."""


class PodResolver:
    """Resolves one pod. `images` maps the name of an image, without its tag, to its entrypoint."""

    def __init__(self, api: KubeApi, pod: Json, images: Mapping[str, list[str]], folder: Path):
        self._api = api
        self._pod = pod
        self._spec = pod["spec"]
        self._namespace = pod["metadata"]["namespace"]
        self._images = images
        self._folder = folder
        self._volumes: dict[str, Path] = {}

    def containers(self, pod_ip: str) -> tuple[list[ContainerSpec], list[ContainerSpec]]:
        """The init containers and the containers. Raises NotYet, and KeyError for an image that
        is not known."""
        for volume in self._spec.get("volumes", []):
            self._volumes[volume["name"]] = self._volume(volume)
        first = [self._container(each, pod_ip) for each in self._spec.get("initContainers", [])]
        return first, [self._container(each, pod_ip) for each in self._spec["containers"]]

    def _container(self, container: Json, pod_ip: str) -> ContainerSpec:
        env = self._environment(container, pod_ip)
        image = container["image"].rpartition("/")[2].partition("@")[0].partition(":")[0]
        command = container.get("command") or self._images[image]
        argv = [_expanded(each, env) for each in [*command, *container.get("args", [])]]
        pod_security = self._spec.get("securityContext", {})
        return ContainerSpec(
            name=container["name"],
            argv=argv,
            env=env,
            mounts=[self._mount(each) for each in container.get("volumeMounts", [])],
            working_dir=container.get("workingDir", "/"),
            security={**pod_security, **container.get("securityContext", {})},
            fs_group=pod_security.get("fsGroup"),
        )

    def _environment(self, container: Json, pod_ip: str) -> dict[str, str]:
        env = {
            "PATH": PATH,
            "HOME": "/",
            "BATON_KERNELS_DIR": KERNELS,  # of the image
            "HOSTNAME": self._pod["metadata"]["name"],
            "KUBERNETES_SERVICE_HOST": "10.98.0.1",
            "KUBERNETES_SERVICE_PORT": "443",
        }
        if self._spec.get("enableServiceLinks", True):
            env |= self._service_links()
        for source in container.get("envFrom", []):
            kind = "secret" if "secretRef" in source else "configMap"
            named = self._data(kind, source[f"{kind}Ref"])
            env |= {source.get("prefix", "") + key: text.decode() for key, text in named.items()}
        for each in container.get("env", []):
            value = each.get("value", "")
            if "valueFrom" in each:
                found = self._value(container, each["valueFrom"], pod_ip)
                if found is None:
                    continue
                value = found
            env[each["name"]] = _expanded(value, env)
        return env

    def _value(self, container: Json, source: Json, pod_ip: str) -> str | None:
        for kind in ("secret", "configMap"):
            reference = source.get(f"{kind}KeyRef")
            if reference is not None:
                data = self._data(kind, reference)
                if reference["key"] in data:
                    return data[reference["key"]].decode()
                if reference.get("optional"):
                    return None
                raise NotYet(f"{kind} {reference['name']} has no key {reference['key']}")
        if "fieldRef" in source:
            return str(self._field(source["fieldRef"]["fieldPath"], pod_ip))
        name = source["resourceFieldRef"]["resource"]
        kind, _, resource = name.partition(".")
        return str(container.get("resources", {}).get(kind, {}).get(resource, "0"))

    def _field(self, path: str, pod_ip: str) -> Any:
        fixed = {"status.podIP": pod_ip, "status.podIPs": pod_ip, "status.hostIP": "10.97.0.1"}
        if path in fixed:
            return fixed[path]
        found: Any = self._pod
        if "[" in path:  # metadata.labels['key']
            path, _, key = path.partition("['")
            return self._pod["metadata"].get(path.split(".")[1], {}).get(key.rstrip("']"), "")
        for part in path.split("."):
            found = found[part]
        return found

    def _service_links(self) -> dict[str, str]:
        """Variables for the services of the namespace, as kubelet injects them."""
        links = {}
        for service in self._api.list(f"/api/v1/namespaces/{self._namespace}/services"):
            address = service["spec"].get("clusterIP", "None")
            if address == "None":
                continue
            prefix = service["metadata"]["name"].upper().replace("-", "_")
            port = service["spec"]["ports"][0]["port"]
            links[f"{prefix}_SERVICE_HOST"] = address
            links[f"{prefix}_SERVICE_PORT"] = str(port)
            links[f"{prefix}_PORT"] = f"tcp://{address}:{port}"
            links[f"{prefix}_PORT_{port}_TCP_ADDR"] = address
        return links

    def _mount(self, mount: Json) -> Mount:
        source = self._volumes[mount["name"]]
        if "subPath" in mount:
            source = source / mount["subPath"]
            if not source.exists():
                source.mkdir(parents=True)
        return Mount(source, mount["mountPath"], mount.get("readOnly", False))

    def _volume(self, volume: Json) -> Path:
        path = self._folder / "volumes" / volume["name"]
        path.mkdir(parents=True, exist_ok=True)
        group = self._spec.get("securityContext", {}).get("fsGroup")
        if "secret" in volume or "configMap" in volume or "projected" in volume:
            self._write_files(volume, path)
        elif "downwardAPI" in volume:
            for item in volume["downwardAPI"]["items"]:
                text = str(self._field(item["fieldRef"]["fieldPath"], ""))
                (path / item["path"]).write_text(text)
        elif "hostPath" in volume:
            return Path(volume["hostPath"]["path"])
        elif "persistentVolumeClaim" in volume:
            claim = volume["persistentVolumeClaim"]["claimName"]
            path = self._folder.parent.parent / "claims" / f"{self._namespace}-{claim}"
            path.mkdir(parents=True, exist_ok=True)
            path.chmod(0o2777)
        elif "emptyDir" in volume:
            path.chmod(0o777)
        else:
            raise NotYet(f"the test kubelet knows no volume like {sorted(volume)}")
        if group is not None:
            os.chown(path, -1, group)
        return path

    def _write_files(self, volume: Json, path: Path) -> None:
        sources = volume.get("projected", {}).get("sources") or [volume]
        for source in sources:
            for kind, name in (("secret", "secretName"), ("configMap", "name")):
                if kind in source:
                    reference = {**source[kind], "name": source[kind].get(name)
                                 or source[kind].get("name")}  # fmt: skip
                    self._write_data(self._data(kind, reference), reference, path)

    @staticmethod
    def _write_data(data: dict[str, bytes], reference: Json, path: Path) -> None:
        items = reference.get("items") or [{"key": key, "path": key} for key in data]
        for item in items:
            target = path / item["path"]
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data[item["key"]])
            target.chmod(item.get("mode", reference.get("defaultMode", 0o644)))

    def _data(self, kind: str, reference: Json) -> dict[str, bytes]:
        plural = {"secret": "secrets", "configMap": "configmaps"}[kind]
        name = reference["name"]
        found = self._api.try_get(f"/api/v1/namespaces/{self._namespace}/{plural}/{name}")
        if found is None:
            if reference.get("optional"):
                return {}
            raise NotYet(f"{kind} {name} does not exist")
        if kind == "secret":
            return {key: base64.b64decode(text) for key, text in found.get("data", {}).items()}
        texts = {key: text.encode() for key, text in (found.get("data") or {}).items()}
        binary = found.get("binaryData") or {}
        return texts | {key: base64.b64decode(text) for key, text in binary.items()}


def _expanded(text: str, env: Mapping[str, str]) -> str:
    """`$(NAME)` replaced by the variable, where there is one."""
    for name, value in env.items():
        text = text.replace(f"$({name})", value)
    return text
