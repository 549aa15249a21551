"""Settings: precedence of their sources, every error by name, and the way back to flags."""

from __future__ import annotations

import enum
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Literal

import pytest

from process.settings import (
    config_path_of,
    flags_given,
    load_settings,
    other_settings,
    setting,
    setting_of,
    settings_or_exit,
    settings_to_args,
    settings_to_env,
    warn_of_unknown_variables,
)
from process.settings.spec import specs_of
from protocol.errors import ConfigError


class Colour(enum.StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, kw_only=True)
class Paint:
    """One field of every type that a setting may have."""

    model: str = setting(help="the model")
    size: int = setting(16, help="the size", unit="tokens", minimum=1, maximum=64, also="--length")
    speed: float = setting(1.5, help="the speed", unit="ms", minimum=0.5)
    limit: int | None = setting(None, help="the limit", minimum=0)
    name: str | None = setting("me", help="the name", pattern=r"[a-z]+")
    shiny: bool = setting(False, help="whether it shines, 100 %")
    colour: Colour = setting(Colour.RED, help="the colour")  # noqa: RUF009
    kind: Literal["oil", "water"] = setting("oil", help="the kind")
    layers: tuple[str, ...] = setting((), help="the layers")
    note: str = setting("", help="a note", free_text=True)
    password: str = setting("", help="the password", secret=True, flag=False, pattern=".{4,}")
    keys: tuple[str, ...] = setting((), help="the keys", secret=True, flag=False)


@dataclass(frozen=True, kw_only=True)
class Brush:
    """Settings of another process."""

    hairs: int = setting(10, help="the hairs")
    size: int = setting(1, help="the size")


@dataclass(frozen=True, kw_only=True)
class Frame:
    """Settings of a process that takes some from another."""

    size: int = setting_of(Paint, "size")
    password: str | None = setting_of(Paint, "password", default=None, help="another one")


def load(*argv: str, file: Path | None = None, model: str | None = "m", **environ: str) -> Paint:
    flags = [*argv, *([f"--model={model}"] if model else [])]
    if file is not None:
        environ["BATON_CONFIG"] = str(file)
    return load_settings(Paint, flags, prog="p", description="d", section="router", environ=environ)


@pytest.fixture
def write(tmp_path: Path):
    def write_file(text: str) -> Path:
        path = tmp_path / "baton.toml"
        path.write_text(text)
        return path

    return write_file


def test_defaults() -> None:
    assert load() == Paint(model="m")


def test_a_foreign_variable_is_warned_of_and_a_service_link_is_not(caplog) -> None:
    environ = {"BATON_QQQQ": "3", "BATON_PORT": "tcp://10.0.0.1:80", "BATON_SIZE": "4"}
    assert load(**environ).size == 4
    with other_settings([Brush]):
        warn_of_unknown_variables(Paint, {**environ, "BATON_HAIRS": "1", "OTHER": "1"})
    assert [record.args for record in caplog.records] == [("BATON_QQQQ",)]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\n\n"])
def test_a_secret_that_ends_in_a_newline_is_the_secret_without_it(end: str, write) -> None:
    assert load(BATON_PASSWORD=f"hid den{end}").password == "hid den"
    assert load(BATON_KEYS=f"one,two{end}").keys == ("one", "two")
    file = write(f"password = {'hidden' + end!r}".replace("'", '"'))
    assert load(file=file).password == "hidden"
    with pytest.raises(ConfigError):
        load(BATON_PASSWORD=end)


def test_free_text_keeps_its_white_space() -> None:
    assert load(BATON_NOTE=" two\nlines\t").note == " two\nlines\t"


def test_a_secret_may_lie_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("hid den\r\n")
    assert load(BATON_PASSWORD_FILE=str(path)).password == "hid den"
    with other_settings([Frame]):
        names = {"prog": "p", "description": "d", "section": "router"}
        environ = {"BATON_PASSWORD_FILE": "/none", "BATON_HAIRS": "2"}
        assert load_settings(Brush, [], environ=environ, **names).hairs == 2
    for changes, words in (
        ({"BATON_PASSWORD": "hidden"}, "give it or BATON_PASSWORD, not both"),
        ({"BATON_PASSWORD_FILE": "/none"}, "/none cannot be read: No such file"),
        ({"BATON_PASSWORD_FILE": str(tmp_path)}, "cannot be read: Is a directory"),
    ):
        with pytest.raises(ConfigError, match=f"environment BATON_PASSWORD_FILE: .*{words}"):
            load(**({"BATON_PASSWORD_FILE": str(path)} | changes))
    path.write_bytes(b"\xff\xfe\xff\xff")
    with pytest.raises(ConfigError, match="it is not UTF-8"):
        load(BATON_PASSWORD_FILE=str(path))
    path.write_text("abc\n")
    with pytest.raises(ConfigError) as error:
        load(BATON_PASSWORD_FILE=str(path))
    assert "abc" not in str(error.value)


def test_a_setting_of_another_class_is_the_same_but_for_what_is_said() -> None:
    own, theirs = specs_of(Frame), specs_of(Paint)
    assert own["size"] == theirs["size"]
    password = own["password"]
    assert (password.default, password.optional) == (None, True)
    assert password.details.help == "another one"
    assert password.details.pattern == theirs["password"].details.pattern
    assert "secret" not in repr(Frame(password="secret"))


def test_each_source_overrides_the_one_before_it(write) -> None:
    file = write('size = 2\nspeed = 3\nlimit = 4\nmodel = "f"\n[router]\nlimit = 5\n')
    loaded = load("--speed=9", file=file, model=None, BATON_SPEED="7", BATON_SHINY="yes")
    assert (loaded.model, loaded.size, loaded.limit) == ("f", 2, 5)
    assert loaded.speed == 9.0
    assert loaded.shiny is True
    assert load("--speed=9", file=file, BATON_SIZE="7").size == 7


def test_a_flag_names_the_file_before_the_environment_does(write, tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text("size = 3\n")
    assert load(f"--config={other}", file=write("size = 2\n")).size == 3


@pytest.mark.parametrize(
    ("flags", "field", "expected"),
    [
        (["--size", "64"], "size", 64),
        (["--speed=2"], "speed", 2.0),
        (["--limit=none"], "limit", None),
        (["--limit=0"], "limit", 0),
        (["--name=None"], "name", None),
        (["--shiny"], "shiny", True),
        (["--shiny=off"], "shiny", False),
        (["--shiny", "--no-shiny"], "shiny", False),
        (["--colour=blue"], "colour", Colour.BLUE),
        (["--kind=water"], "kind", "water"),
        (["--layers=a, b,"], "layers", ("a", "b")),
        (["--layers="], "layers", ()),
        (["--layers", "a", "b,c"], "layers", ("a", "b", "c")),
        (["--size=3", "--size=4"], "size", 4),
        (["--length=3"], "size", 3),
        (["--size=3", "--length", "4"], "size", 4),
    ],
)
def test_text_becomes_a_value(flags: list[str], field: str, expected: object) -> None:
    value = getattr(load(*flags), field)
    assert value == expected
    assert type(value) is type(expected)


def test_toml_values(write) -> None:
    file = write(
        'size = 3\nspeed = 2\nlimit = "none"\nshiny = true\ncolour = "blue"\nlayers = ["a", "b"]'
        '\npassword = "hidden"'
    )
    loaded = load(file=file)
    assert (loaded.size, loaded.speed, loaded.limit) == (3, 2.0, None)
    assert (loaded.shiny, loaded.colour, loaded.layers) == (True, Colour.BLUE, ("a", "b"))
    assert loaded.password == "hidden"
    assert load(file=write("layers = 'a, b'")).layers == ("a", "b")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--size=big"], ["flag --size", "'big'", "an integer of at least 1 and at most 64"]),
        (["--size=0"], ["flag --size", "0", "at least 1"]),
        (["--size=65"], ["flag --size", "at most 64"]),
        (["--size=1.5"], ["flag --size", "an integer"]),
        (["--size="], ["flag --size", "an integer"]),
        (["--size=none"], ["flag --size", "an integer"]),
        (["--speed=fast"], ["flag --speed", "a finite number of at least 0.5"]),
        (["--speed=nan"], ["flag --speed", "a finite number"]),
        (["--speed=inf"], ["flag --speed", "a finite number"]),
        (["--limit=-1"], ["flag --limit", "at least 0, or none"]),
        (["--name=Me"], ["flag --name", "matching [a-z]+"]),
        (["--shiny=maybe"], ["flag --shiny", "true or false"]),
        (["--colour=green"], ["flag --colour", "'green'", "one of red, blue"]),
        (["--kind=gas"], ["flag --kind", "one of oil, water"]),
        (["--siez=3"], ["flag --siez", "unknown", "did you mean --size?"]),
        (["--zzz"], ["flag --zzz", "unknown", "accepted: ", "--colour"]),
        (["--siz", "3"], ["flag --siz", "unknown"]),
        (["--password=hidden"], ["flag --password", "unknown"]),
        (["stray"], ["argument 'stray'", "takes settings only"]),
        (["--size"], ["--size", "expected one argument"]),
        (["--config=/nowhere/x.toml"], ["file /nowhere/x.toml", "No such file"]),
    ],
)
def test_a_wrong_flag_is_named(flags: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        load(*flags)
    assert [word for word in words if word not in str(error.value)] == []
    assert "\n" not in str(error.value)


def test_many_settings_are_not_listed_in_an_error() -> None:
    fields = [(f"setting_{number}", int, setting(1, help="one")) for number in range(21)]
    many = make_dataclass("Many", fields, frozen=True, kw_only=True)
    with pytest.raises(ConfigError) as error:
        load_settings(many, ["--zzz"], prog="p", description="d", section="router", environ={})
    assert str(error.value) == "flag --zzz: unknown; --help lists the accepted ones"


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"BATON_SIZE": "x"}, ["environment BATON_SIZE", "'x'", "an integer"]),
        ({"BATON_SIEZ": "3"}, ["environment BATON_SIEZ", "unknown", "did you mean BATON_SIZE?"]),
        ({"BATON_SPEEDS": "3"}, ["environment BATON_SPEEDS", "unknown", "mean BATON_SPEED?"]),
        ({"BATON_KEYS": ""}, ["environment BATON_KEYS", "is empty", "leave it unset", "a list"]),
        ({"BATON_KEYS": " , "}, ["environment BATON_KEYS", "is empty"]),
        (
            {"BATON_NAME": ""},
            ["environment BATON_NAME", "is empty; leave it unset, or give a text"],
        ),
        ({"BATON_MODEL": ""}, ["environment BATON_MODEL", "is empty; give a text"]),
        ({"BATON_PASSWORD": "abc"}, ["environment BATON_PASSWORD", "matching .{4,}"]),
        ({"BATON_PASSWORD": "abc\ndef"}, ["environment BATON_PASSWORD", "has a line break"]),
        ({"BATON_PASSWORD": " abcdef"}, ["environment BATON_PASSWORD", "begins with a space"]),
        ({"BATON_KEYS": "abc\tdef"}, ["environment BATON_KEYS", "has a control character"]),
        ({"BATON_NAME": "me "}, ["environment BATON_NAME", "'me '", "ends with a space"]),
        ({"BATON_CONFIG": "/nowhere"}, ["file /nowhere"]),
    ],
)
def test_a_wrong_variable_is_named(environ: dict[str, str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        load(**environ)
    assert [word for word in words if word not in str(error.value)] == []
    assert "abc" not in str(error.value), "a secret is not shown"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("size = 'x'", ["key size", "'x'", "an integer"]),
        ("size = true", ["key size", "True", "an integer"]),
        ("size = 1.0", ["key size", "an integer"]),
        ("shiny = 1", ["key shiny", "true or false"]),
        ("layers = [1]", ["key layers", "a list of texts"]),
        ("speed = nan", ["key speed", "a finite number"]),
        ("siez = 1", ["key siez", "did you mean size?"]),
        ("[router]\nsiez = 1", ["key router.siez", "did you mean size?"]),
        ("[router]\nsize = 0", ["key router.size", "at least 1"]),
        ("[roter]\nsize = 1", ["table [roter]", "did you mean router?"]),
        ("router = 1", ["key router", "must be a table"]),
        ("size =", ["is not TOML"]),
        ("size = 1\nsize = 2", ["is not TOML"]),
    ],
)
def test_a_wrong_key_is_named(write, text: str, words: list[str]) -> None:
    file = write(text)
    with pytest.raises(ConfigError) as error:
        load(file=file)
    assert [word for word in [str(file), *words] if word not in str(error.value)] == []
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not TOML"):
        load(file=tmp_path / "x")


def test_a_missing_required_setting_says_where_to_give_it() -> None:
    with pytest.raises(ConfigError) as error:
        load(model=None)
    assert "--model or BATON_MODEL or `model` in the file's [router] table" in str(error.value)


def test_what_belongs_to_other_processes_is_not_refused(write) -> None:
    file = write("hairs = 3\nsize = 2\n[decode]\nanything = 1\n")
    with other_settings([Brush]):
        assert load(file=file, BATON_HAIRS="x") == Paint(model="m", size=2)
        with pytest.raises(ConfigError, match="BATON_HAIR:"):
            load(BATON_HAIR="3")
    with pytest.raises(ConfigError, match="key hairs"):
        load(file=file)
    known = load_settings(
        Paint,
        ["--model=m"],
        prog="p",
        description="d",
        section="router",
        known=[Brush],
        environ={"BATON_HAIRS": "3"},
    )
    assert known == Paint(model="m")


def test_another_process_s_key_in_our_own_table_is_refused(write) -> None:
    with other_settings([Brush]), pytest.raises(ConfigError, match=r"key router\.hairs"):
        load(file=write("[router]\nhairs = 1\n"))


def test_flags_lead_back_to_the_same_settings() -> None:
    painted = Paint(
        model="-m",
        size=3,
        speed=0.75,
        limit=0,
        name=None,
        shiny=True,
        colour=Colour.BLUE,
        kind="water",
        layers=("a", "b"),
        password="hidden",
    )
    args = settings_to_args(painted)
    assert not any("hidden" in arg for arg in args)
    assert settings_to_env(painted) == {"BATON_PASSWORD": "hidden"}
    assert load(*args, model=None, **settings_to_env(painted)) == painted
    assert settings_to_args(Paint(model="m")) == ["--model=m"]


def test_a_secret_is_not_in_the_repr() -> None:
    assert "hidden" not in repr(Paint(model="m", password="hidden"))


def test_help_shows_unit_default_environment_and_choices(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as done:
        load("--help")
    assert done.value.code == 0
    text = capsys.readouterr().out
    for words in (
        "the size [tokens; default: 16; env: BATON_SIZE]",
        "the model [required; env: BATON_MODEL]",
        "[one of red, blue; default: red; env: BATON_COLOUR]",
        "the limit [default: none; env: BATON_LIMIT]",
        "whether it shines, 100 %",
        "password: the password",
    ):
        assert words in text
    assert "--length" not in text


def test_a_main_prints_one_line_and_exits_with_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_SIZE", "many")
    with pytest.raises(SystemExit) as done:
        settings_or_exit(Paint, ["--model=m"], prog="paint", description="d", section="router")
    assert done.value.code == 2
    assert capsys.readouterr().err.startswith("paint: environment BATON_SIZE: 'many' is not")


def test_flags_given_and_config_path() -> None:
    argv = ["--size=16", "--no-shiny", "--config", "here"]
    assert flags_given(Paint, argv) == {"size", "shiny"}
    assert config_path_of(argv, {"BATON_CONFIG": "there"}) == "here"
    assert config_path_of([], {"BATON_CONFIG": "there"}) == "there"
    assert config_path_of([], {}) is None
