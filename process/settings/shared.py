"""Settings that routers and workers share: what is served, in which fleet, how a process runs."""

from __future__ import annotations

from dataclasses import dataclass

from process.settings import setting

NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"


@dataclass(frozen=True, kw_only=True)
class SharedSettings:
    """Settings of every process of a fleet."""

    model: str = setting(
        help="folder of a Hugging Face checkpoint, a GGUF file, or a hub id; demo_model: the model "
        "that comes with Baton"
    )
    revision: str | None = setting(
        None,
        help="commit, tag or branch of a model from the hub; none: its main branch",
        pattern=r"[\w.][\w./-]*",
    )
    served_model_name: tuple[str, ...] = setting(
        (),
        help="names under which the model is served; answers carry the first; none: the folder's "
        "name or the hub id",
        pattern=r"\S+",
    )

    redis_url: str = setting(
        help="Redis or Valkey that holds the fleet, as redis[s]://[:password@]host:port[/db]; "
        "?trust=password behind the URL of a `baton store` with TLS",
        pattern=r"(rediss?|unix)://\S+",
        secret=True,
    )
    redis_ca_file: str | None = setting(
        None,
        help="PEM file of the authorities that signed the certificate of a rediss:// store; "
        "none: those that this host trusts",
    )
    redis_cert_file: str | None = setting(
        None, help="PEM file of our certificate, with its chain, for a store that asks for one"
    )
    redis_key_file: str | None = setting(
        None, help="PEM file of that certificate's key, if it is another file"
    )
    cluster: str = setting(
        "default", help="name of the fleet within that Redis", pattern=NAME_PATTERN
    )
    cluster_secret: str = setting(
        help="secret by which the fleet's processes recognise each other; the same in all of them",
        pattern=r"(?s).{16,}",
        free_text=True,
        secret=True,
        flag=False,
    )

    parent_pid: int | None = setting(
        None, help="stop when this process, our parent, is gone", unit="pid", minimum=1
    )
    log_level: str = setting(
        "info",
        help="least severe log lines to write",
        choices=("debug", "info", "warning", "error"),
    )
    log_format: str = setting(
        "text", help="log lines for people or as JSON", choices=("text", "json")
    )
