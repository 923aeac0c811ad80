"""Signatures that show the options of a `TypedDict`.

Type checkers read `Unpack[TypedDict]`; `help`, notebooks and the API page read the signature, which
would show only `**options`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from inspect import Parameter
from typing import TYPE_CHECKING, Any, TypeVar

from ps_runtime.settings.config import default_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


class Words(str):
    """A type or a default whose `repr` has no quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def shows(options: type, defaults: Mapping[str, object]) -> Callable[[FunctionT], FunctionT]:
    """A decorator: the signature shows each key of `options`, a `TypedDict`, and its default."""
    keys = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=defaults[name], annotation=hint)
        for name, hint in options.__annotations__.items()
    ]

    def decorate(function: FunctionT) -> FunctionT:
        own = inspect.signature(function)
        named = [each for each in own.parameters.values() if each.kind is not each.VAR_KEYWORD]
        shown = [each.replace(annotation=_as_written(each.annotation)) for each in (*named, *keys)]
        returns = _as_written(own.return_annotation)
        vars(function)["__signature__"] = own.replace(parameters=shown, return_annotation=returns)
        return function

    return decorate


THE_CLIENTS = Words("the client's")
"""The shown default of an option whose default is the client's setting."""

OF_THE_CLIENT = ("consistency", "push_codec", "pull_codec")
"""Those options."""


def defaults_of(settings: type[DataclassInstance]) -> dict[str, object]:
    return {field.name: default_of(field) for field in fields(settings)}


def _as_written(annotation: Any) -> Any:
    text = getattr(annotation, "__forward_arg__", annotation)
    return Words(text) if isinstance(text, str) else text
