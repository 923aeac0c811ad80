"""Settings of a role: flag over environment over file over default, resolved once at start.

A role's settings are one frozen dataclass; each field has ``metadata={"help": ...}``. Field
`http_listen` is flag ``--http-listen``, variable ``PUSHPULL_HTTP_LISTEN`` and key ``http_listen``
of a TOML file. An unknown key is an error that names the nearest known one. Types: str, int, float,
bool, Path, tuple[str, ...] (commas), and each of them or None. No number is below 0.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import sys
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ps_core.errors import InvalidConfig
from ps_runtime.settings.environment import PREFIX, check_known, nearest

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    DataclassT = TypeVar("DataclassT", bound=DataclassInstance)
else:
    DataclassT = TypeVar("DataclassT")

ValueT = TypeVar("ValueT")

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise InvalidConfig for a setting that is none of its choices."""
    if value not in choices:
        raise InvalidConfig(f"{name} is '{value}'; expected one of {', '.join(choices)}")


def resolve(
    cls: type[DataclassT],
    flags: Mapping[str, object],
    env: Mapping[str, str],
    file: Path | None = None,
) -> DataclassT:
    """The settings of `cls`: flag, else PUSHPULL_<FIELD>, else the file's key, else the default.

    Args:
        flags: by field name; None means not given. Other names are ignored.
        env: the environment; an empty value counts as not given.
        file: a TOML file, which is read.

    Raises:
        InvalidConfig: an unknown key or variable, a value of the wrong type, or a missing setting;
            the message names it and its source.
    """
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    hints = typing.get_type_hints(cls)
    variables = {name: variable_name(name) for name in fields}
    check_known(env, variables.values())
    from_file = _read(file, list(fields)) if file is not None else {}
    found: dict[str, Any] = {}
    for name, field in fields.items():
        if flags.get(name) is not None:
            value, source = flags[name], flag_name(name)
        elif env.get(variables[name]):
            value, source = env[variables[name]], variables[name]
        elif name in from_file:
            value, source = from_file[name], f"'{name}' in {file}"
        elif _has_default(field):
            continue
        else:
            raise InvalidConfig(
                f"'{name}' is not set; give {flag_name(name)} or {variables[name]}: "
                f"{field.metadata.get('help', 'no description')}"
            )
        found[name] = _converted(value, hints[name], source)
    return cls(**found)


def setting(default: ValueT, text: str, *, is_internal: bool = False) -> ValueT:
    """A field with a default, and its help; an internal one has only a variable."""
    made: ValueT = dataclasses.field(
        default=default, metadata={"help": text, "is_internal": is_internal}
    )
    return made


def flag_name(field: str) -> str:
    return "--" + field.replace("_", "-")


def variable_name(field: str) -> str:
    return PREFIX + field.upper()


def argument_parser(
    cls: type[DataclassInstance], description: str, program: str | None = None
) -> argparse.ArgumentParser:
    """A parser with a flag for each field of `cls`, and --config FILE and --print-config. A flag
    that is not given is None in the result; one that is, is written out.
    """
    parser = argparse.ArgumentParser(
        prog=program,
        usage="%(prog)s [OPTIONS]",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="A setting is its flag, else its variable, else its key in the --config file.",
        allow_abbrev=False,
    )
    add_flags(parser, cls)
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file with settings")
    parser.add_argument(
        "--print-config", action="store_true", help="print the settings in force as TOML and exit"
    )
    return parser


def add_flags(parser: argparse.ArgumentParser, cls: type[DataclassInstance]) -> None:
    """Add a flag for each of `fields_of(cls)`."""
    hints = typing.get_type_hints(cls)
    for field in fields_of(cls):
        _add_flag(parser, field, hints[field.name])


def fields_of(cls: type[DataclassInstance]) -> list[dataclasses.Field[Any]]:
    """The fields with a flag; a field with "is_internal" in its metadata has only a variable."""
    return [f for f in dataclasses.fields(cls) if f.init and not f.metadata.get("is_internal")]


def from_command_line(
    cls: type[DataclassT],
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None = None,
    env: Mapping[str, str] | None = None,
) -> DataclassT:
    """Parse an entry point's command line and resolve its settings. The process ends with status 0
    after --print-config, and with status 2 and a line on stderr when a setting is wrong.
    """
    arguments = vars(parser.parse_args(argv))
    try:
        config = resolve(cls, arguments, os.environ if env is None else env, arguments["config"])
    except InvalidConfig as error:
        parser.error(error.message)
    if arguments["print_config"]:
        print_config(config)
        sys.exit(0)
    return config


def print_config(config: DataclassInstance) -> None:
    """Print the settings as TOML, each under its help; --config accepts the output."""
    for field in dataclasses.fields(config):
        if not field.init:
            continue
        value = getattr(config, field.name)
        print(f"# {field.metadata.get('help', 'no description')}")
        print(f"# {field.name} is not set" if value is None else f"{field.name} = {_toml(value)}")


def _add_flag(parser: argparse.ArgumentParser, field: dataclasses.Field[Any], hint: object) -> None:
    text = str(field.metadata.get("help", "no description"))
    default = default_of(field)
    shown = "" if default in (None, "", ()) else f"; default: {_shown(default)}"
    text = f"{text} [{variable_name(field.name)}{shown}]".replace("%", "%%")
    kind = _kind(hint)
    shape: dict[str, Any] = {"action": argparse.BooleanOptionalAction, "default": None}
    if kind is not bool:
        shape = {"metavar": {int: "N", float: "X", Path: "PATH"}.get(kind, "TEXT")}
    parser.add_argument(flag_name(field.name), dest=field.name, help=text, **shape)


def default_of(field: dataclasses.Field[Any]) -> Any:
    """The field's default; None for a required field."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default if _has_default(field) else None


def _has_default(field: dataclasses.Field[Any]) -> bool:
    missing = dataclasses.MISSING
    return field.default is not missing or field.default_factory is not missing


def _read(file: Path, known: list[str]) -> dict[str, object]:
    try:
        with file.open("rb") as stream:
            values = tomllib.load(stream)
    except OSError as error:
        raise InvalidConfig(f"the file {file} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"the file {file} is not TOML: {error}") from error
    for key in values:
        if key not in known:
            raise InvalidConfig(f"'{key}' in {file} is unknown{nearest(key, known)}")
    return values


def _kind(hint: Any) -> Any:
    """The type of ``X`` or ``X | None``; tuple for a tuple of texts."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = next(kind for kind in typing.get_args(hint) if kind is not type(None))
    return typing.get_origin(hint) or hint


def _converted(value: object, hint: object, source: str) -> object:
    kind = _kind(hint)
    if kind is bool:
        return _boolean(value, source)
    if kind is int:
        return _integer(value, source)
    if kind is float:
        return _number(value, source)
    if kind is tuple:
        return _strings(value, source)
    if kind in (str, Path) and isinstance(value, (str, Path)):
        return Path(value) if kind is Path else str(value)
    raise InvalidConfig(f"{source} is {_shown(value)}; expected text")


def _boolean(value: object, source: str) -> bool:
    text = str(value).lower()
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    raise InvalidConfig(f"{source} is {_shown(value)}; expected one of {', '.join(_TRUE + _FALSE)}")


def _integer(value: object, source: str) -> int:
    with contextlib.suppress(ValueError):
        if isinstance(value, (int, str)) and not isinstance(value, bool) and int(value) >= 0:
            return int(value)
    raise InvalidConfig(f"{source} is {_shown(value)}; expected a whole number, 0 or more")


def _number(value: object, source: str) -> float:
    with contextlib.suppress(ValueError):
        if isinstance(value, (int, float, str)) and not isinstance(value, bool):
            number = float(value)
            if math.isfinite(number) and number >= 0.0:
                return number
    raise InvalidConfig(f"{source} is {_shown(value)}; expected a finite number, 0 or more")


def _strings(value: object, source: str) -> tuple[str, ...]:
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if isinstance(value, (list, tuple)) and all(isinstance(part, str) for part in value):
        return tuple(value)
    raise InvalidConfig(f"{source} is {_shown(value)}; expected texts separated by commas")


def _shown(value: object) -> str:
    if value is None:
        return "not set"
    if isinstance(value, tuple):
        return ",".join(str(part) for part in value) or "none"
    return repr(value) if isinstance(value, str) else str(value)


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(part) for part in value) + "]"
    return json.dumps(str(value), ensure_ascii=False)
