"""Collective calls, which all workers of a cluster make together (SEMANTICS S17).

Every worker makes the same calls, in the same order. Each value counts once, whatever was sent
again, and all workers get the same result. A call waits for every worker that has not left and is
not declared gone, and for those that have yet to come of the number that the cluster was started
for. It needs no scheduler. The same call resumes one that WaitExpired or Ctrl-C interrupted, with
the value of the first time.

A worker that joins while others train takes part from its first step on: before that, `barrier`
returns at once, and the other calls are refused.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from ps_core.collective_calls import Round, Share
from ps_core.errors import InvalidConfig
from ps_runtime.system.clock import now_s
from ps_runtime.system.future_waits import is_done, tell_when_done
from ps_worker.checkpoint.save_points import SavePoints
from ps_worker.client.connection import GRACE_S, ClientConnection


class _OpenCall(NamedTuple):
    """A call whose result the script does not have yet."""

    share: Share
    given: Any


class CollectiveCalls:
    """The collective calls of one worker. One at a time."""

    def __init__(self, connection: ClientConnection, save_points: SavePoints) -> None:
        self._connection = connection
        self._engine = connection.engine
        self._save_points = save_points
        self._open_call: _OpenCall | None = None
        self._caller: dict[str, int] = {}  # the thread that is in a call

    @property
    def takes_part(self) -> bool:
        """False before the first step of a worker that joins others that train."""
        return self._open_call is not None or not self._engine.is_before_first_step

    def barrier(self, name: str = "", *, timeout_s: float | None = None) -> None:
        """Wait until all workers have made the call.

        Args:
            name: for error messages; workers whose names differ are refused.

        Blocking: until all workers have made the call.

        Raises:
            WaitExpired: a worker is missing, named by the message. Call it again to go on waiting.
            InvalidConfig: another worker has made another call, named by the message.
            NotPermitted: this is not a worker.
        """
        self.barrier_left_open(name, timeout_s=timeout_s)
        self.close_call()

    def all_reduce(
        self, value: Any, op: str = "sum", *, name: str = "", timeout_s: float | None = None
    ) -> Any:
        """Reduce a value over all workers: sum, mean, minimum or maximum, the same at each of them.

        Args:
            value: a number, a tensor, an array, or a dict, list or tuple of these.
            op: "sum", "mean", "min" or "max".
            name: as for `barrier`.

        Returns:
            A new value of the same kind, a tensor on the same device. Integers are exact, floats
            are added as float64 in the order of ranks, a tensor in its own dtype (float16 and
            bfloat16 in float32).

        Blocking: until all workers have made the call.

        Raises:
            InvalidTensor: `op` cannot reduce the value; more than 512 KiB from one worker, or more
                than 2 MiB from all together.
            InvalidConfig: as `barrier`; also where shapes, dtypes, keys or `op` differ.
            WaitExpired: as `barrier`.
            NotPermitted: as `barrier`.
        """
        from ps_worker.collectives.encoding import unpacked, words_of
        from ps_worker.collectives.reductions import as_given, reduced, reducible, shape_words

        with self._calling("all_reduce"):
            given = reducible(value, op)
            words = words_of(f"all_reduce({op})", name, shape_words(given))
            ended, first = self._enter(words, (given, value), timeout_s)
            with self._closed_by_failure():
                all_given = [unpacked(share.payload) for share in ended.shares]
                found = as_given(reduced(all_given, op), first)
            self.close_call()
            return found

    def gather(self, value: Any, *, name: str = "", timeout_s: float | None = None) -> list[Any]:
        """Give every worker's value to every worker, by rank: torch's all_gather_object.

        Args:
            value: None, numbers, texts, tensors, arrays, and lists, tuples, sets and dicts of these
                (as for `attach_state`); shapes may differ.
            name: as for `barrier`.

        Returns:
            A list with one item per worker that took part. Tensors are on the CPU.

        Blocking, Raises: as `all_reduce`.
        """
        found = self.gather_left_open(value, name=name, timeout_s=timeout_s)
        self.close_call()
        return found

    def broadcast(
        self, value: Any = None, src: int = 0, *, name: str = "", timeout_s: float | None = None
    ) -> Any:
        """Give the value of rank `src` to every worker.

        Args:
            value: as for `gather`; other ranks need not give one.
            name: as for `barrier`.

        Returns:
            A copy, also at `src`. Tensors are on the CPU.

        Blocking: as `all_reduce`.

        Raises:
            InvalidConfig: as `barrier`; also if no worker has that rank.
            InvalidTensor: as `all_reduce`.
            WaitExpired: as `barrier`.
            NotPermitted: as `barrier`.
        """
        from ps_worker.collectives.encoding import unpacked, words_of

        with self._calling("broadcast"):
            words = words_of(f"broadcast from rank {src}", name)
            given = (value, value) if self._engine.session.rank == src else None
            ended, _ = self._enter(words, given, timeout_s)
            with self._closed_by_failure():
                payload = next((each.payload for each in ended.shares if each.rank == src), None)
                if payload is None:
                    raise InvalidConfig(
                        f"{words}: no worker of that rank takes part: it has left, is gone, or has "
                        "joined and not taken a step yet"
                    )
                found = unpacked(payload)
            self.close_call()
            return found

    # --- calls whose end the caller notes before it closes them

    def barrier_left_open(self, name: str, *, timeout_s: float | None) -> None:
        """As `barrier`; until `close_call` the same call returns at once."""
        with self._calling("barrier"):
            if self.takes_part:
                self._enter("barrier" + f" '{name}'" * bool(name), None, timeout_s)

    def gather_left_open(self, value: Any, *, name: str, timeout_s: float | None) -> list[Any]:
        """As `gather`; until `close_call` the same call returns the same result at once."""
        from ps_worker.collectives.encoding import unpacked, words_of

        with self._calling("gather"):
            ended, _ = self._enter(words_of("gather", name), (value, value), timeout_s)
            with self._closed_by_failure():
                return [unpacked(share.payload) for share in ended.shares]

    def close_call(self) -> None:
        """The caller has the result of the call that was left open."""
        self._open_call = None

    # --- one call

    @contextmanager
    def _closed_by_failure(self) -> Iterator[None]:
        """Close the call if its end is an error. After Ctrl-C the same call returns the result."""
        try:
            yield
        except Exception:
            self.close_call()
            raise

    @contextmanager
    def _calling(self, verb: str) -> Iterator[None]:
        self._connection.check_may_push(f"call {verb}")
        own = threading.get_ident()
        # No lock: one that Ctrl-C leaves locked would refuse this thread's calls for good.
        if self._caller.setdefault("thread", own) != own:
            raise InvalidConfig(
                f"{verb} was called while another thread is in a collective call; make them in one "
                "thread: their order is what workers agree on"
            )
        try:
            yield
        finally:
            self._caller.clear()

    def _enter(
        self, words: str, given: tuple[Any, Any] | None, timeout_s: float | None
    ) -> tuple[Round, Any]:
        """The ended round of the call that `words` describe, and the script's value when it was
        first made; `given` has the value to send and the script's, or is None. The call stays
        open.
        """
        from ps_worker.collectives.encoding import check_agreement, packed

        call, me = self._open_call, self._engine.session
        if call is None and self._engine.is_before_first_step:
            raise InvalidConfig(
                f"{words}: worker {me.rank} joins others that train, and takes part in their "
                "calls from its first step on. Leave out what is called before: "
                "if not client.is_late_joiner; and what is called after the loop, if no step was "
                "left for it: if its clock is that at which it began"
            )
        deadline_s = self._connection.deadline_s(timeout_s)
        if call is None:
            payload = b"" if given is None else packed(given[0], words)
            clock = self._engine.steps.newest_clock
            share = Share(me.rank, me.incarnation, words, clock, payload)
            call = self._open_call = _OpenCall(share, None if given is None else given[1])
        elif call.share.call != words:
            raise InvalidConfig(
                f"{call.share.call} was interrupted, and others may count on it: make that call "
                f"again before {words}"
            )
        entering = self._connection.loop.start(self._engine.enter(call.share, deadline_s))
        end_s = now_s() + deadline_s + GRACE_S
        tell_when_done(entering, self._save_points.wake)
        try:
            self._save_points.accompany(partial(is_done, entering), deadline_s + GRACE_S)
            ended = self._connection.result(entering, max(end_s - now_s(), 0.0))
        finally:
            entering.cancel()
        with self._closed_by_failure():
            check_agreement(ended)
        return ended, call.given
