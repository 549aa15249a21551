"""Recognises the variables that Kubernetes adds to every pod for each Service of its namespace.

A Service named `baton` gives BATON_SERVICE_HOST=10.0.0.1, BATON_SERVICE_PORT_HTTP=80,
BATON_PORT=tcp://10.0.0.1:80 and BATON_PORT_80_TCP_ADDR=10.0.0.1; one named `baton-metrics` gives
BATON_METRICS_PORT, the name of a setting of ours, with a URL where the setting has a number.
Source: https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables
"""

from __future__ import annotations

import re

_OF_A_SERVICE = re.compile(r"\w+_SERVICE_(HOST|PORT(_\w+)?)", re.ASCII)
_OF_A_PORT = re.compile(r"\w+_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?", re.ASCII)
_URL = re.compile(r"(tcp|udp|sctp)://\S+:\d+")


def is_service_link(name: str, value: str) -> bool:
    """Whether an environment variable has a service link's shape."""
    if _OF_A_SERVICE.fullmatch(name) or _OF_A_PORT.fullmatch(name):
        return True
    return name.endswith("_PORT") and _URL.fullmatch(value) is not None
