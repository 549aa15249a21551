"""Loads a process's settings: one frozen dataclass from defaults, file, environment, flags.

Later sources override earlier ones. The file is TOML: all processes share its top-level keys, and a
table named after the process overrides them. An unknown key or flag, and any malformed value,
raises ConfigError with one line that names it, its source and the accepted values. So does an
unknown variable whose name is nearly a known one. Other variables that begin with BATON_ are
accepted, because they may belong to something else, such as Kubernetes's service links.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import logging
import os
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from process.settings.service_links import is_service_link
from process.settings.spec import ENV_PREFIX, SettingSpec, specs_of
from protocol.error_line import one_line
from protocol.errors import ConfigError

log = logging.getLogger(__name__)

CONFIG_ENV = ENV_PREFIX + "CONFIG"
SECTIONS = (
    "up", "router", "prefill", "decode", "status", "doctor", "trace", "drain", "keys", "bench",
    "build-kernels", "demo", "chat", "check", "fetch", "kube-secret", "preflight", "quantize",
    "store", "simulate", "plan", "tune",
)  # fmt: skip
NEAR = 0.75
"""Likeness, from 0 to 1, above which an unknown variable counts as a misspelt one."""
MOST_LISTED = 20
"""Accepted names that an error lists; a command with more says where they are explained."""
S = TypeVar("S")

_others: ContextVar[tuple[type, ...]] = ContextVar("baton_other_settings", default=())


def load_settings(  # noqa: PLR0913 - all but two are keywords that name the process
    cls: type[S],
    argv: Sequence[str],
    *,
    prog: str,
    description: str,
    section: str,
    known: Iterable[type] = (),
    environ: Mapping[str, str] | None = None,
) -> S:
    """The settings of one process. Raises ConfigError; `--help` prints and raises SystemExit(0).

    `section` is the process's table in the file. `known` are settings classes of other processes.
    Their names are accepted and ignored in the environment and at the file's top level, and so are
    the names of an enclosing `other_settings(...)`.
    """
    environ = os.environ if environ is None else environ
    specs = specs_of(cls)
    foreign = [specs_of(other) for other in (*known, *_others.get())]
    flags, config_path = _parse_flags(specs, argv, prog, description)
    path = config_path or environ.get(CONFIG_ENV)
    values: dict[str, Any] = {}
    if path:
        values.update(_from_file(Path(path), specs, section, {n for o in foreign for n in o}))
    values.update(_from_environment(environ, specs, foreign))
    values.update(flags)
    for spec in specs.values():
        if spec.required and spec.name not in values:
            raise ConfigError(_missing(spec, section))
    return cls(**values)


def settings_or_exit(
    cls: type[S], argv: Sequence[str], prog: str, description: str, section: str = ""
) -> S:
    """`load_settings` for a `main`: a ConfigError gives one line on stderr and exit code 2. The
    `section` is that of the command in `prog`, as in "baton drain WORKER", unless it is given."""
    section = section or prog.removeprefix("baton ").partition(" ")[0]
    try:
        return load_settings(cls, argv, prog=prog, description=description, section=section)
    except ConfigError as error:
        print(f"{prog}: {one_line(error)}", file=sys.stderr)
        raise SystemExit(2) from None


def warn_of_unknown_variables(cls: type, environ: Mapping[str, str] | None = None) -> None:
    """Log the variables that begin with BATON_ and that no process knows. Call it once logs are set
    up, after `load_settings`, which refuses misspelt names."""
    environ = os.environ if environ is None else environ
    known = {name for each in (cls, *_others.get()) for name in _variables_of(specs_of(each))}
    for name, text in sorted(environ.items()):
        if _is_unknown(name, known) and not is_service_link(name, text):
            log.warning("environment %s: no process of Baton knows it; it is ignored", name)


@contextlib.contextmanager
def other_settings(classes: Iterable[type]) -> Iterator[None]:
    """A context in which names of these classes are accepted. The `baton` command passes all
    classes."""
    token = _others.set(tuple(classes))
    try:
        yield
    finally:
        _others.reset(token)


def settings_to_args(settings: Any) -> list[str]:
    """Flags that give a child process these settings, without defaults and secrets. Exact only if
    the child's environment and file set no other settings."""
    args: list[str] = []
    for spec in specs_of(type(settings)).values():
        value = getattr(settings, spec.name)
        if value != spec.default and spec.details.flag and not spec.details.secret:
            args.append(f"{spec.flag_name}={spec.to_text(value)}")
    return args


def settings_to_env(settings: Any) -> dict[str, str]:
    """Variables for the settings that `settings_to_args` omits: secrets and those without flag."""
    return {
        spec.env_name: spec.to_text(value)
        for spec in specs_of(type(settings)).values()
        if (value := getattr(settings, spec.name)) != spec.default
        and (spec.details.secret or not spec.details.flag)
    }


def flags_given(cls: type, argv: Sequence[str]) -> frozenset[str]:
    """The settings that `argv` names by flag. Raises ConfigError."""
    return frozenset(_parse_flags(specs_of(cls), argv, "", "")[0])


def config_path_of(argv: Sequence[str], environ: Mapping[str, str]) -> str | None:
    """The settings file named by `argv` or the environment; None if there is none."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    path: str | None = parser.parse_known_args(list(argv))[0].config
    return path or environ.get(CONFIG_ENV)


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are ConfigErrors."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"flags: {message}")


def _parse_flags(
    specs: Mapping[str, SettingSpec], argv: Sequence[str], prog: str, description: str
) -> tuple[dict[str, Any], str | None]:
    parser = _Parser(prog=prog, description=description, allow_abbrev=False)
    parser.add_argument(
        "--config", metavar="FILE", help=f"TOML file with settings [env: {CONFIG_ENV}]"
    )
    for spec in specs.values():
        if spec.details.flag:
            _add_flag(parser, spec)
    if any(not spec.details.flag for spec in specs.values()):
        parser.epilog = "Without a flag, by environment or file only: " + "; ".join(
            f"{spec.name}: {spec.explain()}" for spec in specs.values() if not spec.details.flag
        )
    parsed, rest = parser.parse_known_args(list(argv))
    if rest:
        if not rest[0].startswith("-"):
            raise ConfigError(f"argument {rest[0]!r}: this command takes settings only")
        flags = [spec.flag_name for spec in specs.values() if spec.details.flag]
        name = rest[0].partition("=")[0]
        raise ConfigError(f"flag {name}: unknown{_suggest(name, flags)}")
    given = vars(parsed)
    config = given.pop("config", None)
    values: dict[str, Any] = {}
    for name, given_text in given.items():
        text = ",".join(given_text) if isinstance(given_text, list) else given_text
        values[name] = _converted(specs[name], text, f"flag {specs[name].flag_name}", parse=True)
    return values, config


def _add_flag(parser: argparse.ArgumentParser, spec: SettingSpec) -> None:
    options: dict[str, Any] = {
        "dest": spec.name,
        "default": argparse.SUPPRESS,
        "help": spec.explain().replace("%", "%%"),
    }
    if spec.base is not bool:
        metavar = spec.details.unit or spec.base.__name__
        options["metavar"] = metavar.upper().replace(" ", "_").replace("%", "%%")
        if spec.base is tuple:
            options |= {"nargs": "+", "metavar": "TEXT"}
        for name in spec.flag_names:
            parser.add_argument(name, **options)
            options["help"] = argparse.SUPPRESS
        return
    parser.add_argument(spec.flag_name, nargs="?", const="true", metavar="BOOL", **options)
    negative = "--no-" + spec.flag_name.removeprefix("--")
    options["help"] = argparse.SUPPRESS
    parser.add_argument(negative, action="store_const", const="false", **options)


def _from_environment(
    environ: Mapping[str, str],
    specs: Mapping[str, SettingSpec],
    foreign: Sequence[Mapping[str, SettingSpec]],
) -> dict[str, Any]:
    ours = {spec.env_name: spec for spec in specs.values()}
    files = {spec.file_env_name: spec for spec in specs.values() if spec.file_env_name}
    known = [*ours, *files, *(name for other in foreign for name in _variables_of(other))]
    values: dict[str, Any] = {}
    for name, text in sorted(environ.items()):
        if is_service_link(name, text):
            continue
        source = f"environment {name}"
        if name in ours:
            spec = ours[name]
            values[spec.name] = _converted(spec, text, source, parse=True)
        elif name in files:
            spec = files[name]
            if spec.env_name in environ:
                raise ConfigError(f"{source}: give it or {spec.env_name}, not both")
            values[spec.name] = _converted(spec, _read_secret(text, source), source, parse=True)
        elif (near := _misspelt(name, known)) is not None:
            raise ConfigError(f"{source}: unknown; did you mean {near}?")
    return values


def _variables_of(specs: Mapping[str, SettingSpec]) -> list[str]:
    names = [(spec.env_name, spec.file_env_name) for spec in specs.values()]
    return [name for pair in names for name in pair if name is not None]


def _read_secret(path: str, source: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"{source}: {path} cannot be read: {reason}") from error


def _misspelt(name: str, known: Sequence[str]) -> str | None:
    """The known variable that an unknown BATON_ variable resembles, if any."""
    if not _is_unknown(name, known):
        return None
    stems = [each.removeprefix(ENV_PREFIX) for each in known if each.startswith(ENV_PREFIX)]
    close = difflib.get_close_matches(name.removeprefix(ENV_PREFIX), stems, n=1, cutoff=NEAR)
    return ENV_PREFIX + close[0] if close else None


def _is_unknown(name: str, known: Iterable[str]) -> bool:
    return name.startswith(ENV_PREFIX) and name != CONFIG_ENV and name not in known


def _from_file(
    path: Path, specs: Mapping[str, SettingSpec], section: str, foreign: set[str]
) -> dict[str, Any]:
    content = _read_toml(path)
    own = content.pop(section, {})
    if not isinstance(own, dict):
        raise ConfigError(f"file {path}, key {section}: must be a table")
    shared = {}
    for key, value in content.items():
        if isinstance(value, dict):
            if key not in SECTIONS:
                raise ConfigError(f"file {path}, table [{key}]: unknown{_suggest(key, SECTIONS)}")
        elif key in SECTIONS:
            raise ConfigError(
                f"file {path}, key {key}: must be a table; for a number of workers, set it in [up]"
            )
        elif key in specs or key not in foreign:
            shared[key] = value
    values: dict[str, Any] = {}
    for prefix, table in (("", shared), (f"{section}.", own)):
        for key, value in table.items():
            source = f"file {path}, key {prefix}{key}"
            if key not in specs:
                raise ConfigError(f"{source}: unknown{_suggest(key, specs)}")
            values[key] = _converted(specs[key], value, source, parse=False)
    return values


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"file {path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"file {path}: is not TOML: {error}") from error


def _converted(spec: SettingSpec, raw: Any, source: str, *, parse: bool) -> Any:
    try:
        return spec.parse_text(raw) if parse else spec.check(raw)
    except ValueError as error:
        raise ConfigError(f"{source}: {error}") from None


def _suggest(name: str, accepted: Iterable[str]) -> str:
    names = list(accepted)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.7)
    if close:
        return f"; did you mean {close[0]}?"
    if len(names) > MOST_LISTED:
        return "; --help lists the accepted ones"
    return f"; accepted: {', '.join(names)}"


def _missing(spec: SettingSpec, section: str) -> str:
    ways = [spec.flag_name] if spec.details.flag else []
    ways += [spec.env_name, f"`{spec.name}` in the file's [{section}] table"]
    return f"{spec.name} is required: give {' or '.join(ways)} ({spec.accepted()})"
