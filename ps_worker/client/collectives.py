"""Collective calls, which all workers of a cluster make together (SEMANTICS S17).

client.barrier()
loss = client.all_reduce(loss.item(), "mean")
counts = client.all_reduce({"correct": correct, "seen": seen})
settings = client.broadcast(settings)
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from ps_core.collective import Round, Share
from ps_core.errors import InvalidConfig
from ps_runtime.system.clock import now_s
from ps_worker.client.checkpoints import CheckpointVerbs
from ps_worker.client.connection import GRACE_S
from ps_worker.transport.config import WorkerConfig


class _Call(NamedTuple):
    """A call whose answer the script has not had."""

    share: Share
    given: Any


class CollectiveVerbs(CheckpointVerbs):
    """The part of `ps_worker.client.client.Client` that all workers call together.

    Every worker makes the same calls, in the same order; what they give counts once, whatever was
    sent again, and all are given the same. A call waits for every worker of the cluster that has
    not left and was not declared gone, and for those that have yet to come of the number that it
    was started for. It needs no scheduler.

    A call that was interrupted, by WaitExpired or by Ctrl-C, is made again by the same call; what
    it gave the first time counts.

    A worker that joins while others train takes part from its first step on: before that, `barrier`
    returns at once, and the other calls are refused.
    """

    def __init__(self, config: WorkerConfig) -> None:
        super().__init__(config)
        self._open_call: _Call | None = None
        self._in_call = threading.Lock()

    @property
    def is_main(self) -> bool:
        """Whether this is the worker of rank 0: the one that writes files and prints. There is none
        while rank 0 is gone; the worker that takes its place is.
        """
        return self.rank == 0 and not self.is_reader

    def barrier(self, name: str = "", *, timeout_s: float | None = None) -> None:
        """Wait until all workers are here.

        Args:
            name: of the call, for its errors; workers whose names differ are refused.
            timeout_s: how long to wait; None means the client's request_deadline_s.

        Blocking: until all workers have made the call.

        Raises:
            WaitExpired: somebody is missing, named by the message. Call it again to go on waiting.
            InvalidConfig: another worker has made another call, named by the message.
            NotPermitted: this is no worker.
        """
        with self._calling("barrier"):
            if self._open_call is None and self.engine.is_before_first_step:
                return
            self._enter("barrier" + f" '{name}'" * bool(name), None, timeout_s)

    def all_reduce(
        self, value: Any, op: str = "sum", *, name: str = "", timeout_s: float | None = None
    ) -> Any:
        """Reduce a value over all workers: sum, mean, minimum or maximum, the same at each of them.

        Args:
            value: a number, a tensor, an array, or a dict, list or tuple of these.
            op: "sum", "mean", "min" or "max".
            name: as for `barrier`.
            timeout_s: as for `barrier`.

        Returns:
            A new value of the same kind, a tensor on the same device. Integers are exact, floats
            are added as float64 in the order of ranks, a tensor in its own dtype (float16 and
            bfloat16 in float32).

        Blocking: until all workers have made the call.

        Raises:
            InvalidTensor: a value that cannot be reduced so; more than 512 KiB from one worker, or
                more than 2 MiB from all together.
            InvalidConfig: as `barrier`; also where shapes, dtypes, keys or `op` differ.
            WaitExpired: as `barrier`.
            NotPermitted: as `barrier`.
        """
        from ps_worker.collectives import values as values

        with self._calling("all_reduce"):
            given = values.reducible(value, op)
            words = values.words_of(f"all_reduce({op})", name, values.shape_words(given))
            self._check_has_stepped(words)
            ended, first = self._enter(words, (given, value), timeout_s)
            all_given = [values.unpacked(share.payload) for share in ended.shares]
            return values.as_given(values.reduced(all_given, op), first)

    def gather(self, value: Any, *, name: str = "", timeout_s: float | None = None) -> list[Any]:
        """Hand every worker's value to every worker, by rank: torch's all_gather_object.

        Args:
            value: None, numbers, texts, tensors, arrays, and lists, tuples, sets and dicts of these
                (as for `attach_state`); shapes may differ.
            name: as for `barrier`.
            timeout_s: as for `barrier`.

        Returns:
            A list with an item for each worker that took part. Tensors are on the CPU.

        Blocking, Raises: as `all_reduce`.
        """
        from ps_worker.collectives import values as values

        with self._calling("gather"):
            words = values.words_of("gather", name)
            self._check_has_stepped(words)
            ended, _ = self._enter(words, (value, value), timeout_s)
            return [values.unpacked(share.payload) for share in ended.shares]

    def broadcast(
        self, value: Any = None, src: int = 0, *, name: str = "", timeout_s: float | None = None
    ) -> Any:
        """Hand the value of rank `src` to every worker.

        Args:
            value: as for `gather`; other ranks need not give one.
            src: the rank whose value it is.
            name: as for `barrier`.
            timeout_s: as for `barrier`.

        Returns:
            A copy, also at `src`. Tensors are on the CPU.

        Blocking: as `all_reduce`.

        Raises:
            InvalidConfig: as `barrier`; also where no worker of that rank is here.
            InvalidTensor: as `all_reduce`.
            WaitExpired: as `barrier`.
            NotPermitted: as `barrier`.
        """
        from ps_worker.collectives import values as values

        with self._calling("broadcast"):
            words = values.words_of(f"broadcast from rank {src}", name)
            self._check_has_stepped(words)
            given = (value, value) if self.rank == src else None
            ended, _ = self._enter(words, given, timeout_s)
            for share in ended.shares:
                if share.rank == src:
                    return values.unpacked(share.payload)
            raise InvalidConfig(f"{words}: no worker of that rank is here; it has left or is gone")

    @contextmanager
    def _calling(self, verb: str) -> Iterator[None]:
        self.check_may_push(f"call {verb}")
        if not self._in_call.acquire(blocking=False):
            raise InvalidConfig(
                f"{verb} was called while another thread is in a collective call; make them in one "
                "thread: their order is what workers agree on"
            )
        try:
            yield
        finally:
            self._in_call.release()

    def _check_has_stepped(self, words: str) -> None:
        if self._open_call is None and self.engine.is_before_first_step:
            raise InvalidConfig(
                f"{words}: worker {self.rank} joins others that train, and takes part in their "
                "calls from its first step on. Leave out what is called before: "
                "if not client.is_newcomer"
            )

    def _enter(
        self, words: str, given: tuple[Any, Any] | None, timeout_s: float | None
    ) -> tuple[Round, Any]:
        """The round that this call is, and what the script gave when it was made first.

        Args:
            words: say which call it is.
            given: what is sent, and what the script gave; None: nothing.
            timeout_s: None means the client's request_deadline_s.
        """
        from ps_worker.collectives.values import check_agreement, packed

        deadline_s = self.deadline_s(timeout_s)
        call = self._open_call
        if call is None:
            payload = b"" if given is None else packed(given[0], words)
            me, clock = self.session, self.engine.newest_clock
            share = Share(me.rank, me.incarnation, words, clock, payload)
            call = self._open_call = _Call(share, None if given is None else given[1])
        elif call.share.call != words:
            raise InvalidConfig(
                f"{call.share.call} was interrupted, and others may count on it: make that call "
                f"again before {words}"
            )
        entering = self._loop.start(self.engine.collectives.enter(call.share, deadline_s))
        end_s = now_s() + deadline_s + GRACE_S
        entering.add_done_callback(self.save_points.wake)
        try:
            self.save_points.accompany(entering.done, deadline_s + GRACE_S)
            ended = self._result(entering, max(end_s - now_s(), 0.0))
        finally:
            entering.cancel()
        self._open_call = None
        check_agreement(ended)
        return ended, call.given
