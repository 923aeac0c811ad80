"""Options of a function as its signature shows them, where it takes them as a `TypedDict`.

Type checkers read `Unpack[TypedDict]`; `help`, notebooks and the API page ask the function, and
would see `**options` alone.
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
    """A type or a default that is shown as it is, without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def shows(options: type, defaults: Mapping[str, object]) -> Callable[[FunctionT], FunctionT]:
    """A decorator: the function's signature has each key of `options`, with its type and default.

    Args:
        options: the `TypedDict` of what the function takes as `**options`.
        defaults: what a key is that is left out.
    """
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
"""A default that is the setting of the client."""


def defaults_of(settings: type[DataclassInstance]) -> dict[str, object]:
    """The defaults of a dataclass's fields."""
    return {field.name: default_of(field) for field in fields(settings)}


def _as_written(annotation: Any) -> Any:
    text = getattr(annotation, "__forward_arg__", annotation)
    return Words(text) if isinstance(text, str) else text
