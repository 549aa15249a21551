"""Connections to a service's address go to one of its ready pods, as kube-proxy would send them.

Endpoints come from the real endpoints controller. A connection stays with its pod until it ends,
also after the pod has left the service.
"""

from __future__ import annotations

import asyncio
import random
import threading
from contextlib import suppress

from tests.kube.api import Json, KubeApi
from tests.kube.network import add_service_address

POLL_S = 0.1


class ServiceProxy:
    """Owns a thread with all listeners. Call `stop`."""

    def __init__(self, api: KubeApi) -> None:
        self._api = api
        self._is_over = threading.Event()
        self._random = random.Random(1)
        self._servers: dict[tuple[str, int], asyncio.Server] = {}
        self._connections: set[asyncio.Task[None]] = set()
        self._targets: dict[tuple[str, int], list[tuple[str, int]]] = {}
        self._thread = threading.Thread(target=asyncio.run, args=(self._run(),), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Close all listeners and connections."""
        self._is_over.set()
        self._thread.join(10)

    async def _run(self) -> None:
        while not self._is_over.is_set():
            services, endpoints = await asyncio.to_thread(self._read)
            await self._follow(services, endpoints)
            await asyncio.sleep(POLL_S)
        for server in self._servers.values():
            server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _read(self) -> tuple[list[Json], dict[str, Json]]:
        endpoints = self._api.list("/api/v1/endpoints")
        named = {_name(each): each for each in endpoints}
        return self._api.list("/api/v1/services"), named

    async def _follow(self, services: list[Json], endpoints: dict[str, Json]) -> None:
        targets: dict[tuple[str, int], list[tuple[str, int]]] = {}
        for service in services:
            address = service["spec"].get("clusterIP", "None")
            if address in ("None", ""):
                continue
            subsets = endpoints.get(_name(service), {}).get("subsets", [])
            for port in service["spec"]["ports"]:
                targets[address, port["port"]] = _ready(subsets, port.get("name", ""))
        self._targets = targets
        for address, number in targets.keys() - self._servers.keys():
            await asyncio.to_thread(add_service_address, address)
            self._servers[address, number] = await asyncio.start_server(
                lambda reader, writer, key=(address, number): self._open(key, reader, writer),
                address,
                number,
            )
        for key in self._servers.keys() - targets.keys():
            self._servers.pop(key).close()

    def _open(
        self, key: tuple[str, int], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(key, reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(
        self, key: tuple[str, int], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        targets = self._targets.get(key, [])
        try:
            if not targets:
                raise ConnectionRefusedError
            there_reader, there_writer = await asyncio.open_connection(
                *self._random.choice(targets)
            )
            try:
                await asyncio.gather(_copy(reader, there_writer), _copy(there_reader, writer))
            finally:
                await _close(there_writer)
        except OSError:
            writer.transport.abort()  # refused, as by a pod that does not listen
        finally:
            await _close(writer)


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy until the end or an error, and pass on either."""
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except OSError:
        writer.transport.abort()
        return
    with suppress(OSError):
        if writer.can_write_eof():
            writer.write_eof()


def _ready(subsets: list[Json], name: str) -> list[tuple[str, int]]:
    found = []
    for subset in subsets:
        ports = [each["port"] for each in subset.get("ports", []) if each.get("name", "") == name]
        for address in subset.get("addresses", []):
            found += [(address["ip"], port) for port in ports]
    return found


def _name(item: Json) -> str:
    return f"{item['metadata']['namespace']}/{item['metadata']['name']}"
