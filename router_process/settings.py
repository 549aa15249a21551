"""The settings of a router, by flag, `BATON_` variable or file.

The operator chooses them; each room declares its own. The fleet's properties (context,
fingerprints, block size) come from the workers' registrations.
"""

from __future__ import annotations

from dataclasses import dataclass

from console.settings import ConsoleSettings
from gateway.settings import GatewaySettings
from process.settings import setting_of
from process.settings.shared import SharedSettings
from router.settings import RoutingSettings


@dataclass(frozen=True, kw_only=True)
class RouterSettings(ConsoleSettings, RoutingSettings, GatewaySettings):
    """Settings of one router process."""

    model: str = setting_of(
        SharedSettings,
        "model",
        help="checkpoint whose tokenizer and chat template serve: a folder, or a hub id",
    )
    served_model_name: tuple[str, ...] = setting_of(
        SharedSettings,
        "served_model_name",
        help="names under which the model is served, the first of which answers carry; without "
        "any: the name that the workers give",
    )
