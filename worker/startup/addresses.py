"""The addresses at which a worker listens and others reach it. They are checked before the model
loads, and so are all other settings that can be checked by then.

A worker listens on `host` and registers the advertised address. In a container the two differ: it
listens on all addresses of its pod.
"""

from __future__ import annotations

import logging
import os
import urllib.parse
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import TypeVar

import zmq

from process.sockets.host_names import is_wildcard, unbracketed
from process.sockets.options import bind, open_socket, tcp_endpoint
from process.sockets.outer_address import outer_address
from process.store.first_contact import check_store
from process.store.registry import check_url
from process.store.store_url import store_url
from protocol.errors import ConfigError
from worker.settings import WorkerSettings

log = logging.getLogger(__name__)

S = TypeVar("S", bound=WorkerSettings)


def checked(settings: S) -> S:
    """The settings with the advertised address. Raises ConfigError for faults that would stop the
    worker after its model has loaded (ports, addresses, the store), or that it would silently do
    without (its kernels)."""
    if settings.kernels_dir is not None and not os.path.isdir(settings.kernels_dir):
        raise ConfigError(f"kernels_dir {settings.kernels_dir}: there is no such folder")
    check_url(store_url(settings))
    check_ports(settings)
    address = advertised_address(settings)
    log.info("others reach this worker at %s", address)
    check_store(store_url(settings), settings.cluster)
    return replace(settings, advertise_address=address)


def advertised_address(settings: WorkerSettings) -> str:
    """The host name or address for the registration. Raises ConfigError if there is none."""
    if settings.advertise_address is not None:
        return settings.advertise_address
    if not is_wildcard(settings.host):
        return settings.host
    store_host = urllib.parse.urlsplit(settings.redis_url).hostname
    return outer_address(store_host, is_ipv4_only=":" not in settings.host)


def advertised(endpoint: str, address: str) -> str:
    """A listening endpoint (`tcp://host:port`) as others reach it."""
    return tcp_endpoint(unbracketed(address), int(endpoint.rpartition(":")[2]))


def check_ports(settings: WorkerSettings) -> None:
    """Listen on both ports for a moment. Raises ConfigError if that is impossible."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    ports = ((zmq.ROUTER, settings.control_port), (zmq.PUB, settings.events_port))
    with ExitStack() as stack:
        stack.callback(context.term)
        for kind, port in ports:
            socket = stack.enter_context(closing(open_socket(context, kind)))
            bind(socket, tcp_endpoint(settings.host, port))
