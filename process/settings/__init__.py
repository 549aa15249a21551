"""Settings of a process: declared once, from defaults, file, environment and flags.

`loader` reads them, `spec` is one setting, `shared` declares those that routers and workers have in
common. Imports `protocol`.
"""

from process.settings.loader import (
    SECTIONS,
    config_path_of,
    flags_given,
    load_settings,
    other_settings,
    settings_or_exit,
    settings_to_args,
    settings_to_env,
    warn_of_unknown_variables,
)
from process.settings.spec import setting, setting_of

__all__ = [
    "SECTIONS",
    "config_path_of",
    "flags_given",
    "load_settings",
    "other_settings",
    "setting",
    "setting_of",
    "settings_or_exit",
    "settings_to_args",
    "settings_to_env",
    "warn_of_unknown_variables",
]
