"""Settings of the console: targets of the fleet, and the export of traces and metrics."""

from __future__ import annotations

from dataclasses import dataclass

from process.settings import setting
from process.settings.shared import SharedSettings


@dataclass(frozen=True, kw_only=True)
class ConsoleSettings(SharedSettings):
    """Settings of the operators' view."""

    ttft_target_ms: float = setting(
        1000.0, help="target of the time to the first token", unit="ms", minimum=0.1
    )
    tpot_target_ms: float | None = setting(
        None,
        help="target of the time per output token; none: the workers' itl_target_ms",
        unit="ms",
        minimum=0.1,
    )
    goodput_target: float = setting(
        0.95,
        help="share of requests that are to meet both targets",
        minimum=0.0,
        maximum=1.0,
    )

    otlp_endpoint: str | None = setting(
        None,
        help="where to send traces over OTLP, as http://collector:4318 (which stands for "
        "http://collector:4318/v1/traces); none: nowhere (needs the extra otlp)",
        pattern=r"https?://\S+",
    )
    otlp_sample_ratio: float = setting(
        1.0,
        help="share of requests to trace of those whose clients send no traceparent",
        minimum=0.0,
        maximum=1.0,
    )
    vllm_metric_names: bool = setting(
        False, help="show the router's metrics under vLLM's names, too, for dashboards made for it"
    )
