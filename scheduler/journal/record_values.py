"""Values as JSON and back, by their type: frozen dataclasses, enumerations, tuples, sets, mappings.

    dataclass, NamedTuple     an object with every field by its name
    Enum                      its value
    bytes                     hexadecimal digits
    tuple, list, set          an array; a set is sorted
    mapping                   an array of pairs: keys are no strings

Rules:
    - Annotations give the types, so a field added to a dataclass is written from then on. A field
      that a record lacks takes its default; unknown fields and other types are refused.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping
from enum import Enum
from functools import cache
from typing import Any

from ps_core.manifest import Imported
from ps_core.tables.table_spec import TableSpec

Writer = Callable[[Any], Any]
Reader = Callable[[Any], Any]


def to_json(annotation: Any, value: Any) -> Any:
    return _codec(annotation)[0](value)


def from_json(annotation: Any, read: Any) -> Any:
    """The value that `to_json` wrote as `read`; ValueError for another type or unknown field."""
    return _codec(annotation)[1](read)


def _kind(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    """The type behind an annotation, and its arguments."""
    while isinstance(annotation, typing.NewType):
        annotation = annotation.__supertype__
    return typing.get_origin(annotation) or annotation, typing.get_args(annotation)


@cache
def _fields(kind: type) -> dict[str, tuple[Any, bool]]:
    """Annotation of each field, and True where the field has a default."""
    hints = typing.get_type_hints(kind)
    if not dataclasses.is_dataclass(kind):
        defaults = getattr(kind, "_field_defaults", {})
        return {name: (hints[name], name in defaults) for name in kind._fields}  # type: ignore[attr-defined]
    return {
        each.name: (
            hints[each.name],
            each.default is not dataclasses.MISSING
            or each.default_factory is not dataclasses.MISSING,
        )
        for each in dataclasses.fields(kind)
    }


@cache
def _codec(annotation: Any) -> tuple[Writer, Reader]:
    """The functions that write and read the values of a type."""
    kind, arguments = _kind(annotation)
    if kind is Imported:
        return _imported_to_json, lambda came: Imported.of(
            came["url"], from_json(list[TableSpec], came["specs"])
        )
    if kind is float:
        return _as_it_is, lambda came: float(_checked(came, int, float))
    if kind in (int, str, bool, type(None)):
        return _as_it_is, lambda came: _checked(came, kind)
    if kind is bytes:
        return bytes.hex, lambda came: bytes.fromhex(_checked(came, str))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return lambda value: value.value, kind
    if kind in (types.UnionType, typing.Union):
        write, read = _codec(_one_of(arguments))
        return (
            lambda value: None if value is None else write(value),
            lambda came: None if came is None else read(came),
        )
    if kind is tuple and arguments[-1] is not Ellipsis:
        writers, readers = zip(*map(_codec, arguments), strict=True)
        return (
            lambda value: [write(item) for write, item in zip(writers, value, strict=True)],
            lambda came: tuple(
                read(item) for read, item in zip(readers, _checked(came, list), strict=True)
            ),
        )
    if kind in (tuple, list, set, frozenset):
        write, read = _codec(arguments[0])
        in_order = sorted if issubclass(kind, set | frozenset) else list
        return (
            lambda value: in_order(map(write, value)),
            lambda came: kind(map(read, _checked(came, list))),
        )
    if isinstance(kind, type) and issubclass(kind, Mapping):
        (write_key, read_key), (write, read) = map(_codec, arguments)
        return (
            lambda value: [[write_key(key), write(each)] for key, each in value.items()],
            lambda came: {read_key(key): read(each) for key, each in _checked(came, list)},
        )
    if not dataclasses.is_dataclass(kind) and not hasattr(kind, "_fields"):
        raise TypeError(f"{kind!r} is of no type that a journal keeps")
    fields = [(name, _codec(hint)[0]) for name, (hint, _) in _fields(kind).items()]
    return (
        lambda value: {name: write(getattr(value, name)) for name, write in fields},
        lambda came: _record_from_json(kind, came),
    )


def _record_from_json(kind: Any, read: Any) -> Any:
    fields = _fields(kind)
    unknown = _checked(read, dict).keys() - fields.keys()
    if unknown:
        raise ValueError(f"{kind.__name__} has no field '{min(unknown)}'")
    missing = [name for name, (_, has) in fields.items() if not has and name not in read]
    if missing:
        raise ValueError(f"{kind.__name__} lacks its field '{missing[0]}'")
    return kind(**{name: _codec(fields[name][0])[1](value) for name, value in read.items()})


def _one_of(arguments: tuple[Any, ...]) -> Any:
    """The type T of `T | None`."""
    found = [each for each in arguments if each is not type(None)]
    if len(found) != 1:
        raise TypeError(f"{arguments!r} is a choice that a journal cannot tell apart")
    return found[0]


def _checked(read: Any, *kinds: type) -> Any:
    if type(read) not in kinds:
        raise ValueError(f"{read!r:.80} came; expected {kinds[0].__name__}")
    return read


def _as_it_is(value: Any) -> Any:
    return value


def _imported_to_json(imported: Imported) -> Any:
    """Tables of an import, each once: every tensor names its table."""
    specs = {id(spec): spec for spec, _ in imported.tensors.values()}
    return {"url": imported.url, "specs": to_json(list[TableSpec], list(specs.values()))}
