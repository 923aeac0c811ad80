"""The client: the verbs on tables, over a session with a cluster.

    with ps.connect() as client:
        table = client.create_table("w", (784, 10), optimizer=ps.SGD(lr=0.1))
        ticket = client.push(table, gradient)       # ends the step: clock 1
        weights = client.pull(table)                # BSP: with clock 1 of every worker in it

For `DistributedOptimizer` and other code that moves blocks itself there is a second level, which
copies nothing: `begin_step` (a `ps_worker.steps.steps.Step`: `push_blocks`, `seal`),
`begin_assign`, `start_pull` and `wait_all` (`ps_worker.client.connection`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TypeAlias, TypedDict, Unpack, overload

from ps_core.errors import InvalidConfig, PushpullError
from ps_core.tables import Hyperparameters
from ps_runtime.observe import logs
from ps_worker.client.collectives import CollectiveVerbs
from ps_worker.client.shown_options import defaults_of, shows
from ps_worker.spec.cutting import BlockPart, Piece, Region, check_shape, cut, pieces_of, region_of
from ps_worker.spec.values import Array, Values, empty, shape_of, writable_raw_of
from ps_worker.steps.counters import Progress
from ps_worker.steps.table_handle import TableHandle, check_handle
from ps_worker.steps.tickets import PullTicket, PushTicket
from ps_worker.transport.config import WorkerConfig, job_place, worker_config
from ps_worker.transport.pulls import ReadOrder

Part: TypeAlias = slice | str | None
"""A part of a table: a slice of elements, a tensor's name, or all of it."""


class ConnectOptions(TypedDict, total=False):
    """The keyword arguments of `connect`, which has their meaning."""

    role: str
    rank: int | None
    world_size: int
    run: str
    identity: str
    cluster_id: str
    connect_deadline_s: float
    request_deadline_s: float
    lane: str
    window_bytes: int
    consistency: str
    compute: str
    record: str
    http_listen: str


@shows(ConnectOptions, defaults_of(WorkerConfig))
def connect(scheduler: str | None = None, **options: Unpack[ConnectOptions]) -> Client:
    """Join a cluster as a worker or as a reader.

    Args:
        scheduler: "host:port", or several of them with commas; None means PUSHPULL_SCHEDULER.

    Options (one that is left out comes from its PUSHPULL_* variable, else it has its default):
        role (str, 'worker'): "worker" trains, "reader" only pulls, "operator" looks after the
            cluster: consistency, checkpoints.
        rank (int | None, None): the rank to ask for; None takes that of torchrun, Slurm, MPI or
            Kubernetes, and where there is none the lowest free one.
        world_size (int, 0): the workers that the job has: a cluster that is for another number
            refuses this one at once. 0: the job's if the rank is the job's, else it is not known.
        run (str, ''): the name of the run that this is of, with ranks and tables of its own
            (docs/RUNS.md); empty: the run without a name.
        identity (str, ''): who this worker is, whichever process it runs in: with the same one it
            has its rank back at once when it is started again; "hostname": this host's name. Of
            several workers of one process the first has it. Empty: nobody in particular.
        cluster_id (str, ''): the cluster that is meant; empty: whichever answers.
        connect_deadline_s (float, 60.0): how long to go on trying to reach the cluster.
        request_deadline_s (float, 300.0): how long a push, a pull or a wait may take.
        lane (str, 'auto'): "auto" shares memory with the servers on this host and sends the others
            bytes, "shm" is an error where memory cannot be shared, "grpc" always sends bytes.
        window_bytes (int, 33554432): payload bytes in flight: sent and not yet received.
        consistency (str, ''): of tables that name none: "bsp" (also if empty), "ssp:4", "asp", ...
        compute (str, ''): emulated computation of a step of `DistributedOptimizer`, such as "30ms",
            or "rotating:30ms,90ms,burst=2,seed=1"; empty emulates none.
        record (str, ''): a directory for a record of the steps, as `pushpull compare` reads it;
            empty records nothing.
        http_listen (str, ''): "host:port" where this process serves /metrics and /healthz, port 0
            is a free one (`Client.http_address`); empty: nowhere, but under `pushpull worker` and
            `pushpull train`, which serve them anyway.

    Returns:
        The client; a context manager. It leaves the cluster at the end of a `with` block that ends
        normally, when `close` is called, and at the normal end of the process.

    Blocking: until the cluster has answered, at most `connect_deadline_s`.

    Raises:
        InvalidConfig: a wrong setting; a rank that is taken; a worker beyond the cluster's number.
        Fenced: the scheduler's cluster is not `cluster_id`.
        Unauthenticated: this process has not the cluster's join secret.
        WaitExpired: nobody answered in time.
    """
    unknown = set(options) - set(ConnectOptions.__annotations__)
    if unknown:
        raise InvalidConfig(
            f"connect has no option {', '.join(sorted(unknown))}; it has "
            f"{', '.join(sorted(ConnectOptions.__annotations__))}"
        )
    place = None
    try:
        place = job_place(options, os.environ)
        if place is not None:
            logs.info("rank_of_job", rank=place.rank, workers=place.world_size, source=place.source)
        client = Client(worker_config({"scheduler": scheduler, **options}))
    except PushpullError as refusal:
        if place is not None and isinstance(refusal, InvalidConfig):
            refusal = InvalidConfig(f"{refusal.message}; this process is {place}")
        # What goes on within is no help to who asked, and would hide the reason.
        raise refusal.with_traceback(None) from None
    if not client.is_reader:
        logs.info("worker_joined", rank=client.rank, workers=client.world_size)
    return client


class Client(CollectiveVerbs):
    """A session with a cluster. Made by `connect`; its verbs may be called from several threads."""

    # --- what to know

    def progress(self) -> Progress:
        """What this client has done so far; never blocks."""
        counters = self.engine.counters
        return Progress(
            pushed_bytes=counters.pushed_bytes,
            pulled_bytes=counters.pulled_bytes,
            step_count=counters.step_count,
            loss=counters.loss,
            staleness=counters.staleness,
            waiting_for=counters.waiting_for,
            planned_step_count=counters.planned_step_count,
            clocks={handle.name: handle.clock for handle in list(self._handles.values())},
            lane=self.engine.lane,
        )

    def report(
        self,
        *,
        loss: float | None = None,
        planned_steps: int | None = None,
        step_count: int | None = None,
        quality: Mapping[str, float] | None = None,
    ) -> None:
        """Say how training goes, for what `pushpull train` and `pushpull compare` show.

        Args:
            loss: the last loss; a one-element tensor will do. A bound of staleness that moves
                heeds it.
            planned_steps: how many steps the script means to take.
            step_count: how many it has taken; by default the highest clock of its tables.
            quality: at the end of training, how good the model is, by the measure's name, such as
                {"test accuracy": 0.97}. `compare` takes the worker's whose last step ended last:
                without a barrier the others' models lack steps.

        Blocking: no; it travels with the next heartbeat.
        """
        self.check_usable()
        counters = self.engine.counters
        if loss is not None:
            counters.add_loss(float(loss))
            self.record.loss(float(loss), counters.step_count)
        if planned_steps is not None:
            counters.planned_step_count = int(planned_steps)
        if step_count is not None:
            counters.reported_step_count = int(step_count)
        if quality is not None:
            self.record.quality({name: float(value) for name, value in quality.items()})

    # --- pushing

    def push(
        self,
        table: TableHandle,
        values: Values | Mapping[str, Values],
        *,
        slice: Part = None,  # noqa: A002 - the verb's own word
        seal: bool = True,
        hyperparameters: Mapping[str, float] | None = None,
        copy: bool = True,
    ) -> PushTicket:
        """Push a gradient, and end the step.

        Args:
            table: where to.
            values: the gradient; or, for a table with a layout, a mapping of tensor names to
                gradients: tensors that it leaves out are skipped, as torch skips a grad of None.
            slice: the part that `values` is: a slice of elements that begins and ends at an edge of
                a block or a tensor, or a tensor's name; None means all.
            seal: end the step with this push; False leaves it open for more, until `seal`.
            hyperparameters: the optimizer's numbers for this step (with `seal`); those left out are
                the table's.
            copy: keep a copy of the values. With False they must not change before the ticket is
                done, which saves the copy.

        Shapes:
            values: the table's shape, or flat; dtype as the table's.

        Blocking: no, unless MAX_UNCOMMITTED_STEP_COUNT steps of the table are on their way.

        Raises:
            InvalidTensor: another dtype or shape than the table's.
            InvalidKeys: a part that the table does not have.
            InvalidConfig: hyperparameters that the optimizer lacks, or that come without `seal`.
            NotPermitted: a reader pushes.
        """
        numbers = _numbers(table, hyperparameters)
        if hyperparameters and not seal:
            raise InvalidConfig("hyperparameters belong to the seal; give them with it")
        parts = _parts(table, values, slice, copy=copy)
        with self._loop.together():
            step = self.begin_step(table)
            step.push_parts(parts)
            return step.seal(numbers) if seal else step.ticket

    def seal(
        self,
        table: TableHandle,
        *,
        hyperparameters: Mapping[str, float] | None = None,
        contribution_scale: float = 1.0,
        skip: bool = False,
        clip_scale: float | None = None,
    ) -> PushTicket:
        """End the step: all that was pushed since the last seal takes part in the update.

        Args:
            table: which table.
            hyperparameters: the optimizer's numbers for this step; those left out are the table's.
            contribution_scale: this worker's gradients are multiplied by it; finite, above 0.
            skip: the step takes no part in the update.
            clip_scale: clip the gradient by its norm. Where each step is an update of its own (SSP,
                ASP) it is multiplied by this as well; finite, above 0. Under BSP the update waits:
                the ticket's result has `squares`, and `scale_update` must follow. All workers give
                it, or none.

        Blocking: as `push`.

        Raises:
            InvalidConfig: hyperparameters that the optimizer lacks.
            NotPermitted: a reader seals.
        """
        numbers = _numbers(table, hyperparameters)
        step = self.begin_step(table)
        return step.seal(
            numbers, contribution_scale=contribution_scale, skip=skip, clip_scale=clip_scale
        )

    def scale_update(self, table: TableHandle, clock: int, scale: float) -> PushTicket:
        """Say what an update is multiplied by that waits for it. All workers say the same.

        Args:
            table: which table.
            clock: the step, whose result had `squares`.
            scale: 0 or above.

        Blocking: no. The ticket is done when the update has been applied everywhere.

        Raises (the ticket):
            InvalidConfig: another worker said something else, or the update waits for no scale.
        """
        self.check_may_push("scale")
        self._check_own(table)
        return table.steps.scale(clock, scale)

    def assign(
        self,
        table: TableHandle,
        values: Values | Mapping[str, Values],
        *,
        slice: Part = None,  # noqa: A002 - the verb's own word
        seal: bool = True,
        copy: bool = True,
    ) -> PushTicket:
        """Give a table that starts `FromRank0()` its initial values; until then everybody waits.

        Args, Shapes, Blocking: as `push`.

        Raises:
            NotPermitted: this is not rank 0.
            InvalidConfig: the table starts otherwise, or has been given its values.
            InvalidTensor: another dtype or shape than the table's.
        """
        parts = _parts(table, values, slice, copy=copy)
        step = self.begin_assign(table)
        step.push_parts(parts)
        return step.seal() if seal else step.ticket

    def push_pull(
        self,
        table: TableHandle,
        values: Values | Mapping[str, Values],
        *,
        out: Array | None = None,
        hyperparameters: Mapping[str, float] | None = None,
        timeout_s: float | None = None,
    ) -> Array:
        """Push a gradient, end the step, and pull the table with the step in it.

        Args, Shapes: as `push` and `pull`.

        Blocking: until the step is committed and the values are here.

        Raises:
            PushpullError: as `push`, `pull` and `wait`.
        """
        check_handle(table)
        with self._loop.together():
            ticket = self.push(table, values, hyperparameters=hyperparameters)
            pulled = self._pull(table, region_of(table.table, None), out, timeout_s=timeout_s)
        self._wait_for([ticket, pulled], timeout_s)
        return pulled.future.result()

    # --- pulling

    @overload
    def pull(
        self,
        table: TableHandle,
        *,
        out: Array | None = None,
        slice: Part = None,
        consistent: bool = False,
        callback: None = None,
        timeout_s: float | None = None,
    ) -> Array: ...

    @overload
    def pull(
        self,
        table: TableHandle,
        *,
        out: Array | None = None,
        slice: Part = None,
        consistent: bool = False,
        callback: Callable[[Array], None],
        timeout_s: float | None = None,
    ) -> PullTicket[Array]: ...

    def pull(
        self,
        table: TableHandle,
        *,
        out: Array | None = None,
        slice: Part = None,  # noqa: A002 - the verb's own word
        consistent: bool = False,
        callback: Callable[[Array], None] | None = None,
        timeout_s: float | None = None,
    ) -> Array | PullTicket[Array]:
        """Pull parameters: under BSP with every worker's steps up to this worker's clock in them.

        Args:
            table: where from.
            out: an array or CPU tensor to write into; None makes one.
            slice: the part to pull: a slice of elements, or a tensor's name; None means all.
            consistent: readers: exactly the state after one clock, in every part of the table.
                Under SSP that holds up the workers that are ahead until the others are there, at
                most `staleness` clocks. Under ASP there is no such state: each range of the table
                is as it was between two updates. What a worker pulls under BSP is so anyway.
            callback: called with the values on a thread of its own once they are here; the call
                then returns a ticket at once. If the pull fails, `wait` on the ticket raises.
            timeout_s: how long the pull may take; None means the client's request_deadline_s.

        Returns:
            The values: `out`, or a numpy array (a torch tensor for bfloat16).

        Shapes:
            out: the shape of the part, or flat; C-contiguous; dtype as the table's. If the pull
            fails its content is undefined.

        Blocking: until the values are here; not with a callback.

        Raises:
            InvalidTensor: `out` has another dtype or shape.
            InvalidKeys: a part that the table does not have.
            InvalidConfig: `consistent` by a worker, on a table that is not BSP.
            WaitExpired: the message says whom the pull waits for.
        """
        check_handle(table)
        region = region_of(table.table, slice)
        ticket = self._pull(table, region, out, consistent=consistent, timeout_s=timeout_s)
        if callback is None:
            return self.wait(ticket, timeout_s)
        return self._with_callback(ticket, callback)

    def _pull(
        self,
        table: TableHandle,
        region: Region,
        out: Array | None,
        *,
        consistent: bool = False,
        timeout_s: float | None = None,
    ) -> PullTicket[Array]:
        if out is not None:
            check_shape(shape_of(out), region, "out")
        values = empty(region.shape, table.dtype) if out is None else out
        raw = writable_raw_of(values, table.dtype, "out")
        order = self.read_order(table, raw, region, consistent=consistent, timeout_s=timeout_s)
        return PullTicket(table.table, self._loop.start(self._values(order, values)))

    async def _values(self, order: ReadOrder, values: Array) -> Array:
        await self.engine.read(order)
        return values

    def _with_callback(
        self, ticket: PullTicket[Array], callback: Callable[[Array], None]
    ) -> PullTicket[Array]:
        done: Future[Array] = Future()

        def arrived(values: Future[Array]) -> None:
            self._callbacks.call(lambda: finish(values))

        def finish(values: Future[Array]) -> None:
            failure = values.exception()
            if failure is not None:
                logs.warning("pull_failed", table=ticket.table.spec.name, error=failure)
                done.set_exception(failure)
                return
            try:
                callback(values.result())
            finally:
                done.set_result(values.result())

        ticket.future.add_done_callback(arrived)
        return PullTicket(ticket.table, done)


def _numbers(table: TableHandle, given: Mapping[str, float] | None) -> Hyperparameters:
    """The numbers of a step, sorted; refused at once where the optimizer lacks one."""
    check_handle(table)
    if not given:
        return ()
    numbers = tuple(sorted((name, float(value)) for name, value in given.items()))
    table.spec.optimizer.merged(numbers)
    return numbers


def _parts(
    table: TableHandle, values: Values | Mapping[str, Values], part: Part, *, copy: bool
) -> list[BlockPart]:
    """The blocks of a push, all checked before the first of them leaves."""
    check_handle(table)
    pieces = pieces_of(table.table, values, part)
    if copy:
        pieces = [Piece(piece.begin, piece.end, piece.raw.copy()) for piece in pieces]
    return list(cut(table.table, pieces))
