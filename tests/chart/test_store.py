"""How a release's pods reach its store, and whom they trust."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from process.store.store_tls import split_tls
from process.store.store_url import store_url
from tests.chart.chart import Object, objects, of_kind, pod_templates
from tests.chart.releases import RELEASES
from tests.chart.test_process_settings import SECRETS, settings_of

PASSWORD = SECRETS["BATON_STORE_PASSWORD"]


def release(name: str) -> list[Object]:
    (values,) = [each.values for each in RELEASES if each.name == name]
    return objects(values)


def containers(found: list[Object]) -> dict[str, tuple[Object, Object]]:
    """Pod and container of each process by its command."""
    named = {}
    for _, pod in pod_templates(found):
        for container in pod["spec"]["containers"]:
            named[container["command"][1]] = (pod["spec"], container)
    return named


def store_of(found: list[Object]) -> Any:
    return settings_of(containers(found)["store"][1])


def urls_of(found: list[Object]) -> set[str]:
    """What all members connect to; the files that they name are mounted."""
    urls = set()
    for command in {"router", "prefill", "decode", "preflight"} & containers(found).keys():
        pod, container = containers(found)[command]
        settings = settings_of(container)
        mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
        volumes = {each["name"]: each for each in pod["volumes"]}
        for file in (settings.redis_ca_file, settings.redis_cert_file, settings.redis_key_file):
            if file is not None:
                folder, _, name = file.rpartition("/")
                secret = volumes[mounts[folder]]["secret"]
                assert name in [each["path"] for each in secret.get("items", [{"path": name}])]
        urls.add(store_url(settings))
    return urls


def ports_of(found: list[Object]) -> set[int]:
    """The ports of the store, which its Service, its pod and its policy agree about."""
    _, container = containers(found)["store"]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    service = of_kind(found, "Service")["store"]["spec"]["ports"]
    assert {each["targetPort"]: each["port"] for each in service} == ports
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["tcpSocket"]["port"] == "store-tls", "the other one closes"
    policies = of_kind(found, "NetworkPolicy")
    if "store" in policies:
        (rule,) = policies["store"]["spec"]["ingress"]
        assert {each["port"] for each in rule["ports"]} == set(ports.values())
    return set(ports.values())


def test_members_encrypt_and_the_plain_port_serves_pods_of_an_earlier_chart() -> None:
    found = release("nothing")
    (url,) = urls_of(found)
    assert url == f"rediss://:{PASSWORD}@demo-baton-store:6380/0?trust=password"
    assert split_tls(url)[1] is not None
    store = store_of(found)
    assert (store.tls_port, store.port, store.plain_idle_s) == (6380, 6379, 900)
    assert ports_of(found) == {6379, 6380}


def test_with_a_certificate_of_one_s_own_members_check_it_by_its_authority() -> None:
    found = release("persistent-store")
    (url,) = urls_of(found)
    parts = urlsplit(url)
    assert (parts.scheme, parts.hostname, parts.port) == ("rediss", "demo-baton-store", 6380)
    assert parts.query == "ssl_ca_certs=%2Fetc%2Fbaton%2Fstore-ca%2Fca.crt"
    store = store_of(found)
    assert store.plain_idle_s == 0
    pod, container = containers(found)["store"]
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert store.tls_cert_file == f"{mounts['store-tls']}/tls.crt"
    assert store.tls_key_file == f"{mounts['store-tls']}/tls.key"
    for each, _ in containers(found).values():
        for volume in each["volumes"]:
            if volume.get("secret", {}).get("secretName") == "store-certificate":
                given = [item["key"] for item in volume["secret"].get("items", [])]
                assert given == ([] if each is pod else ["ca.crt"]), "the key is the store's alone"
    assert ports_of(found) == {6380}


def test_without_tls_the_store_still_serves_both_so_that_a_change_loses_nothing() -> None:
    found = release("open")
    assert urls_of(found) == {f"redis://:{PASSWORD}@demo-baton-store:6379/0"}
    store = store_of(found)
    assert (store.tls_port, store.port, store.plain_idle_s) == (6380, 6379, None)
    assert ports_of(found) == {6379, 6380}


def test_an_external_store_has_its_authorities_and_our_certificate() -> None:
    (url,) = urls_of(release("external-store"))
    given, _, files = url.partition("?")
    assert given == SECRETS["BATON_REDIS_URL"]
    assert files.split("&") == [
        "ssl_ca_certs=%2Fetc%2Fbaton%2Fstore-ca%2Fca.crt",
        "ssl_certfile=%2Fetc%2Fbaton%2Fstore-client%2Ftls.crt",
        "ssl_keyfile=%2Fetc%2Fbaton%2Fstore-client%2Ftls.key",
    ]
