"""Service links of Kubernetes among the variables: what has their shape is none of ours."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from process.settings import load_settings, setting
from process.settings.service_links import is_service_link


def links_of(service: str, host: str, ports: dict[str, int], protocol: str) -> dict[str, str]:
    """The variables that a kubelet adds for a Service: the first port also has no name."""
    name = service.upper().replace("-", "_")
    first = next(iter(ports.values()))
    links = {
        f"{name}_SERVICE_HOST": host,
        f"{name}_SERVICE_PORT": str(first),
        f"{name}_PORT": f"{protocol}://{host}:{first}",
    }
    for port_name, port in ports.items():
        prefix = f"{name}_PORT_{port}_{protocol.upper()}"
        links[f"{name}_SERVICE_PORT_{port_name.upper().replace('-', '_')}"] = str(port)
        links[prefix] = f"{protocol}://{host}:{port}"
        links |= {f"{prefix}_PROTO": protocol, f"{prefix}_PORT": str(port), f"{prefix}_ADDR": host}
    return links


@dataclass(frozen=True, kw_only=True)
class Ports:
    """Settings with the names that service links may have."""

    port: int = setting(8000, help="the port", minimum=0)
    metrics_port: int | None = setting(None, help="the port")
    host: str = setting("127.0.0.1", help="the host")


LABELS = st.from_regex(r"[a-z]([a-z0-9-]{0,12}[a-z0-9])?", fullmatch=True)


@given(
    service=st.sampled_from(["baton", "baton-router", "baton-redis", "baton-metrics"])
    | LABELS.map(lambda label: f"baton-{label}"),
    host=st.sampled_from(["10.0.0.1", "[fd00::1]"]),
    ports=st.dictionaries(LABELS, st.integers(1, 65535), min_size=1, max_size=3),
    protocol=st.sampled_from(["tcp", "udp", "sctp"]),
)
def test_no_service_of_the_namespace_changes_or_stops_a_process(
    service: str, host: str, ports: dict[str, int], protocol: str
) -> None:
    links = links_of(service, host, ports, protocol)
    assert [name for name, value in links.items() if not is_service_link(name, value)] == []
    names = {"prog": "p", "description": "d", "section": "router"}
    assert load_settings(Ports, [], environ=links, **names) == Ports()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("BATON_PORT", "8000"),
        ("BATON_METRICS_PORT", "0"),
        ("BATON_HOST", "10.0.0.1"),
        ("BATON_REDIS_URL", "redis://10.0.0.1:6379"),
        ("BATON_PORT_FILE", "/run/port"),
        ("BATON_KV_PORTS", "41000-41099"),
        ("BATON_MODEL", "tcp://10.0.0.1:80"),
    ],
)
def test_settings_are_no_service_links(name: str, value: str) -> None:
    assert not is_service_link(name, value)
