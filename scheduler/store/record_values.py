"""Values as JSON and back, by their type: frozen dataclasses, enumerations, tuples, sets, mappings.

    dataclass, NamedTuple     an object with every field by its name
    Enum                      its value
    bytes                     hexadecimal digits
    tuple, list, set          an array; a set is sorted
    mapping                   an array of pairs: keys are no strings

Rules:
    - Annotations give the types, so a field added to a dataclass is written from then on. A field
      that a record lacks takes its default; an unknown field, or a value of another type, is
      refused.
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
from ps_core.tables import TableSpec

Writer = Callable[[Any], Any]
Reader = Callable[[Any], Any]


def to_json(annotation: Any, value: Any) -> Any:
    """The value as `json` writes it."""
    return _writer(annotation)(value)


def from_json(annotation: Any, read: Any) -> Any:
    """The value that `to_json` wrote as `read`; ValueError for another type or unknown field."""
    return _reader(annotation)(read)


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


def _is_record(kind: Any) -> bool:
    return dataclasses.is_dataclass(kind) or hasattr(kind, "_fields")


@cache
def _writer(annotation: Any) -> Writer:
    kind, arguments = _kind(annotation)
    if kind is Imported:
        return _imported_to_json
    if kind in (int, float, str, bool, type(None)):
        return _as_it_is
    if kind is bytes:
        return bytes.hex
    if isinstance(kind, type) and issubclass(kind, Enum):
        return lambda value: value.value
    if kind in (types.UnionType, typing.Union):
        inner = _writer(_one_of(arguments))
        return lambda value: None if value is None else inner(value)
    if kind is tuple and arguments[-1] is not Ellipsis:
        each = [_writer(argument) for argument in arguments]
        return lambda value: [write(item) for write, item in zip(each, value, strict=True)]
    if kind in (tuple, list):
        item = _writer(arguments[0])
        return lambda value: [item(each) for each in value]
    if kind in (set, frozenset):
        member = _writer(arguments[0])
        return lambda value: sorted(member(each) for each in value)
    if isinstance(kind, type) and issubclass(kind, Mapping):
        key, item = map(_writer, arguments)
        return lambda value: [[key(name), item(each)] for name, each in value.items()]
    return _record_writer(kind)


def _record_writer(kind: Any) -> Writer:
    if not _is_record(kind):
        raise TypeError(f"{kind!r} is of no type that a journal keeps")
    fields = [(name, _writer(hint)) for name, (hint, _) in _fields(kind).items()]
    return lambda value: {name: write(getattr(value, name)) for name, write in fields}


@cache
def _reader(annotation: Any) -> Reader:
    kind, arguments = _kind(annotation)
    if kind is Imported:
        return _imported_from_json
    if kind is float:
        return lambda read: float(_checked(read, int, float))
    if kind in (int, str, bool, type(None)):
        return lambda read: _checked(read, kind)
    if kind is bytes:
        return lambda read: bytes.fromhex(_checked(read, str))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind
    if kind in (types.UnionType, typing.Union):
        inner = _reader(_one_of(arguments))
        return lambda read: None if read is None else inner(read)
    if kind is tuple and arguments[-1] is not Ellipsis:
        each = [_reader(argument) for argument in arguments]
        return lambda read: tuple(
            reads(item) for reads, item in zip(each, _checked(read, list), strict=True)
        )
    if kind in (tuple, list, set, frozenset):
        item = _reader(arguments[0])
        return lambda read: kind(map(item, _checked(read, list)))
    if isinstance(kind, type) and issubclass(kind, Mapping):
        key, item = map(_reader, arguments)
        return lambda read: {key(name): item(each) for name, each in _checked(read, list)}
    return lambda read: _record_from_json(kind, read)


def _record_from_json(kind: Any, read: Any) -> Any:
    fields = _fields(kind)
    unknown = _checked(read, dict).keys() - fields.keys()
    if unknown:
        raise ValueError(f"{kind.__name__} has no field '{min(unknown)}'")
    missing = [name for name, (_, has) in fields.items() if not has and name not in read]
    if missing:
        raise ValueError(f"{kind.__name__} lacks its field '{missing[0]}'")
    return kind(**{name: _reader(fields[name][0])(value) for name, value in read.items()})


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


def _imported_from_json(read: Any) -> Imported:
    return Imported.of(read["url"], from_json(list[TableSpec], read["specs"]))
