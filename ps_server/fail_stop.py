"""A server that may have done half of what it decided does nothing more, and ends (SEMANTICS S8).

A decision and all that follows from it are one. A machine that breaks while it decides, or an
effect that fails, leaves behind what nobody decided: it must not be told to backups, read or
written down. So the process ends; its backups, or its update log, have what was decided before.

Rules:
    - A refusal is an answer, and breaks nothing: a `PushpullError` that a machine raises. A broken
      invariant is no refusal, and while effects are carried out there is none.
    - Whatever path the event came by: gRPC, streams and the event loop swallow what their handlers
      raise, so that is not enough.

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
    """What has become of one server.

    Attributes:
        failure: what broke it, if anything did.
        on_failure: called once, at that moment.
    """

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self.on_failure: Callable[[Exception], None] = _nothing

    def failed(self, failure: Exception) -> None:
        """Something broke; the first that did says why."""
        if self.failure is None:
            self.failure = failure
            self.on_failure(failure)

    def check(self) -> None:
        """Nothing is begun any more once something broke (FS-1).

        Raises:
            Draining: it did.
        """
        if self.failure is not None:
            raise Draining(
                f"the server has failed ({type(self.failure).__name__}) and ends",
                retry_after_ms=_RETRY_MS,
            )


class _Mortal(Protocol):
    @property
    def health(self) -> FailStop: ...


MortalT = TypeVar("MortalT", bound=_Mortal)
_Method = Callable[Concatenate[MortalT, Params], ResultT]


def decides(method: _Method[MortalT, Params, ResultT]) -> _Method[MortalT, Params, ResultT]:
    """Wrap a method that hands an event to a machine: it may be refused. A generator is guarded
    from its first step to its last.
    """
    if inspect.isgeneratorfunction(method):
        return cast("_Method[MortalT, Params, ResultT]", _in_steps(method, is_refusable=True))

    @functools.wraps(method)
    def guarded(self: MortalT, /, *args: Params.args, **kwargs: Params.kwargs) -> ResultT:
        self.health.check()
        try:
            return method(self, *args, **kwargs)
        except InvariantViolation as failure:
            self.health.failed(failure)
            raise
        except PushpullError:
            raise
        except Exception as failure:
            self.health.failed(failure)
            raise

    return guarded


def carries_out(method: _Method[MortalT, Params, ResultT]) -> _Method[MortalT, Params, ResultT]:
    """Wrap a method that does what was decided: nothing of that can be refused. Generators as in
    `decides`.
    """
    if inspect.isgeneratorfunction(method):
        return cast("_Method[MortalT, Params, ResultT]", _in_steps(method, is_refusable=False))

    @functools.wraps(method)
    def guarded(self: MortalT, /, *args: Params.args, **kwargs: Params.kwargs) -> ResultT:
        self.health.check()
        try:
            return method(self, *args, **kwargs)
        except Exception as failure:
            self.health.failed(failure)
            raise

    return guarded


def _in_steps(steps_of: Callable[..., Generator[Any, Any, Any]], *, is_refusable: bool) -> Any:
    @functools.wraps(steps_of)
    def guarded(self: _Mortal, /, *args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        self.health.check()
        try:
            return (yield from steps_of(self, *args, **kwargs))
        except Exception as failure:
            is_refusal = isinstance(failure, PushpullError)
            if not (is_refusable and is_refusal) or isinstance(failure, InvariantViolation):
                self.health.failed(failure)
            raise

    return guarded


def _nothing(failure: Exception) -> None:
    del failure
