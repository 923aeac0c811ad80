"""Ends a server whose decision may have been carried out by half only (SEMANTICS S8).

A decision and its effects are one. A machine that breaks while it decides, or an effect that
fails, leaves a state that nobody decided: it must not reach backups, readers or the log. So the
process ends; its backups, or its update log, have all earlier decisions.

Rules:
    - A refusal is an answer, and breaks nothing: a `PushpullError` that a machine raises. A broken
      invariant is no refusal, and while effects are carried out there is no refusal.
    - Failures are noted where they happen: gRPC, streams and the event loop swallow the exceptions
      of their handlers.

Invariants:
    FS-1  Once it has failed, a server decides and carries out nothing.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

from ps_core.errors import Draining, InvariantViolation, PushpullError

_RETRY_MS = 500

Params = ParamSpec("Params")
ResultT = TypeVar("ResultT")


class FailStop:
    """Health of one server; `on_failure` is called once, with the first failure."""

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self.on_failure: Callable[[Exception], None] = _nothing

    def failed(self, failure: Exception) -> None:
        """Note a failure; only the first counts."""
        if self.failure is None:
            self.failure = failure
            self.on_failure(failure)

    def check(self) -> None:
        """Refuse to begin anything after a failure (FS-1)."""
        if self.failure is None:
            return
        if isinstance(self.failure, Draining):
            raise Draining(self.failure.message, retry_after_ms=_RETRY_MS)
        problem = f"the server has failed ({type(self.failure).__name__}) and ends"
        raise Draining(problem, retry_after_ms=_RETRY_MS)


class _Mortal(Protocol):
    @property
    def health(self) -> FailStop: ...


MortalT = TypeVar("MortalT", bound=_Mortal)
_Method = Callable[Concatenate[MortalT, Params], ResultT]


def decides(method: _Method[MortalT, Params, ResultT]) -> _Method[MortalT, Params, ResultT]:
    """Wrap a method, or generator, that hands an event to a machine, which may refuse it."""
    return _guarded(method, may_refuse=True)


def carries_out(method: _Method[MortalT, Params, ResultT]) -> _Method[MortalT, Params, ResultT]:
    """Wrap a method, or generator, that carries decisions out: none can be refused."""
    return _guarded(method, may_refuse=False)


def _guarded(
    method: _Method[MortalT, Params, ResultT], *, may_refuse: bool
) -> _Method[MortalT, Params, ResultT]:
    def note(self: _Mortal, failure: Exception) -> None:
        is_refusal = isinstance(failure, PushpullError)
        if not (may_refuse and is_refusal) or isinstance(failure, InvariantViolation):
            self.health.failed(failure)

    @functools.wraps(method)
    def call(self: MortalT, /, *args: Params.args, **kwargs: Params.kwargs) -> ResultT:
        if self.health.failure is not None:
            self.health.check()
        try:
            return method(self, *args, **kwargs)
        except Exception as failure:
            note(self, failure)
            raise

    generator = cast("Any", method)

    @functools.wraps(method)
    def steps(self: Any, /, *args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        if self.health.failure is not None:
            self.health.check()
        try:
            return (yield from generator(self, *args, **kwargs))
        except Exception as failure:
            note(self, failure)
            raise

    return cast("Any", steps) if inspect.isgeneratorfunction(method) else call


def _nothing(_: Exception) -> None: ...
