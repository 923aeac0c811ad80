"""An accelerator in Python: a device "fake", whose tensors are in host memory, with streams and
events, for the tests of what runs on a device where there is none.

Rules:
    - What a script computes is done at once. A copy with `non_blocking=True` on a stream of its own
      is done late: when somebody waits for it, or `lag_count` more copies are queued behind.
    - Whoever uses memory too early, or writes it too early, so finds other values than it should.
    - `race_count` counts accesses that no event orders, as torch's CUDA sanitizer finds them: it is
      its event handler that is asked.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.cuda import _sanitizer
from torch.utils import _pytree as pytree
from torch.utils import backend_registration

NAME = "fake"


class FakeStream:
    """A queue of copies and waits. `synchronize` does them all."""

    def __init__(self, device: object = None, **_: object) -> None:
        self.number = len(RUNTIME.streams)
        self.queue: deque[Callable[[], object]] = deque()
        RUNTIME.streams.append(self)
        RUNTIME.sanitizer._handle_stream_creation(self.number)
        del device

    @property
    def device(self) -> torch.device:
        return torch.device(NAME, 0)

    def put(self, work: Callable[[], object], lag_count: int = 0) -> None:
        """Queue some work; what is more than `lag_count` behind the newest is done."""
        with RUNTIME.lock:
            self.queue.append(work)
            while len(self.queue) > lag_count:
                self.queue.popleft()()

    def drain(self) -> None:
        with RUNTIME.lock:
            while self.queue:
                self.queue.popleft()()

    def synchronize(self) -> None:
        self.drain()
        RUNTIME.sanitizer._handle_stream_synchronization(self.number)

    def query(self) -> bool:
        return not self.queue

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        event = event or FakeEvent()
        event.record(self)
        return event

    def wait_event(self, event: FakeEvent) -> None:
        with RUNTIME.lock:
            RUNTIME.sanitizer._handle_event_wait(event.number, self.number)
            if not event.query():
                self.queue.append(event.reach)

    def wait_stream(self, stream: FakeStream) -> None:
        self.wait_event(stream.record_event())


class FakeEvent:
    """The end of what a stream has queued."""

    def __init__(self, **_: object) -> None:
        self.number = RUNTIME.next_event
        RUNTIME.next_event += 1
        self._ended = threading.Event()
        self._ended.set()
        self._stream: FakeStream | None = None
        RUNTIME.sanitizer._handle_event_creation(self.number)

    def record(self, stream: FakeStream | None = None) -> None:
        with RUNTIME.lock:
            stream = stream or RUNTIME.current_stream()
            self._stream = stream
            if stream.queue:
                self._ended.clear()
                stream.queue.append(self._ended.set)
            RUNTIME.sanitizer._handle_event_record(self.number, stream.number)

    def reach(self) -> None:
        """Have its stream do all before it."""
        with RUNTIME.lock:
            while self._stream is not None and not self._ended.is_set():
                self._stream.queue.popleft()()

    def query(self) -> bool:
        if RUNTIME.lands_by_itself:
            self.reach()
        return self._ended.is_set()

    def synchronize(self) -> None:
        self.reach()
        RUNTIME.sanitizer._handle_event_synchronization(self.number)


class Runtime:
    """What `torch.fake` is: the part of `torch.cuda` that a training script and pushpull use.

    Attributes:
        lag_count: copies that a stream of copies is behind.
        lands_by_itself: copies end while the script does something else.
        race_count: accesses that nothing orders.
    """

    Stream = FakeStream
    Event = FakeEvent

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.lag_count = 2
        self.lands_by_itself = False
        self.race_count = 0
        self.next_event = 0
        self.sanitizer: Any = _sanitizer.EventHandler()
        self.streams: list[FakeStream] = []
        self._own = threading.local()
        self._allocated: set[int] = set()

    def begin(self) -> None:
        """Have the default stream."""
        FakeStream()

    def forget(self) -> None:
        """Do what is queued, and begin to count races anew."""
        for stream in self.streams:
            stream.drain()
        self.sanitizer = _sanitizer.EventHandler()
        for stream in self.streams:
            self.sanitizer._handle_stream_creation(stream.number)
        self.race_count = 0

    def current_stream(self, device: object = None) -> FakeStream:
        del device
        found: FakeStream = getattr(self._own, "stream", self.streams[0])
        return found

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before = self.current_stream()
        self._own.stream = stream
        yield
        self._own.stream = before

    def synchronize(self, device: object = None) -> None:
        del device
        for stream in self.streams:
            stream.drain()
        self.sanitizer._handle_device_synchronization()

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        del seed

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def allocated(self, raw: torch.Tensor) -> None:
        """When its memory is free, whoever gets it next has nothing to do with who used it."""
        storage = raw.untyped_storage()
        address = storage.data_ptr()
        with self.lock:
            if address not in self._allocated:
                self._allocated.add(address)
                weakref.finalize(storage, self._freed, address)

    def _freed(self, address: int) -> None:
        self._allocated.discard(address)
        self.sanitizer.tensors_accessed.accesses.pop(address, None)

    # --- what is computed

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator on host memory; its results are on the device if the operator's are."""
        name, stream = func._schema.name, self.current_stream()
        is_late = kwargs.get("non_blocking", len(args) > 2 and args[2] is True)
        if name in _COPIES and is_late and stream is not self.streams[0]:
            self._look(func, args, kwargs, stream)
            raw = pytree.tree_map(_raw, args[:2])
            stream.put(lambda: func(*raw), self.lag_count)
            return args[0] if name == "aten::copy_" else None
        stream.drain()  # its computation comes after what it waits for
        self._look(func, args, kwargs, stream)
        device = kwargs.get("device")
        is_to_host = device is not None and torch.device(device).type == "cpu"
        own = {key: value for key, value in kwargs.items() if key != "pin_memory"}
        if device is not None:
            own["device"] = torch.device("cpu")
        given = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Array)]
        known = {id(each.raw): each for each in given}
        host_args, host_kwargs = pytree.tree_map(_raw, (args, own))
        found = func(*host_args, **host_kwargs)
        if is_to_host and given and any(found is each.raw for each in given):
            found = found.clone()

        def placed(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or is_to_host:
                return value
            if name == "aten::copy_":
                return args[0]
            return known[id(value)] if id(value) in known else Array(value)

        return pytree.tree_map(placed, found)

    def _look(self, func: Any, args: Any, kwargs: Any, stream: FakeStream) -> None:
        """Tell the sanitizer which memory of the device an operator reads and writes."""
        read: set[int] = set()
        written: set[int] = set()
        for argument, value in zip(func._schema.arguments, args, strict=False):
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            for each in pytree.tree_leaves(value):
                if isinstance(each, Array) and each.raw.numel():
                    (written if is_written else read).add(each.raw.untyped_storage().data_ptr())
        for each in pytree.tree_leaves(kwargs):
            if isinstance(each, Array) and each.raw.numel():
                read.add(each.raw.untyped_storage().data_ptr())
        is_view = func._schema.name in _VIEWS
        if is_view or not (read or written):
            return
        with self.lock:
            found = self.sanitizer._handle_kernel_launch(
                stream.number, read - written, written, set(), func._schema.name,
                defaultdict(list),
            )  # fmt: skip
            self.race_count += len(found)


_COPIES = ("aten::copy_", "aten::_foreach_copy_")
_VIEWS = frozenset(
    f"aten::{name}"
    for name in ("view", "detach", "t", "transpose", "as_strided", "select", "slice", "expand",
                 "permute", "alias", "unsqueeze", "squeeze", "_unsafe_view", "split", "unbind")
)  # fmt: skip
"""They touch no memory."""


def _raw(value: Any) -> Any:
    return value.raw if isinstance(value, Array) else value


class Array(torch.Tensor):
    """A tensor on the device. `raw` has its elements."""

    raw: torch.Tensor

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, raw.size(), strides=raw.stride(), storage_offset=raw.storage_offset(),
            dtype=raw.dtype, device=torch.device(NAME, 0),
        )  # fmt: skip

    def __init__(self, raw: torch.Tensor) -> None:
        super().__init__()
        self.raw = raw
        RUNTIME.allocated(raw)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        return RUNTIME.run(func, args, kwargs or {})

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    def record_stream(self, stream: object) -> None:
        """Memory that a stream still uses is not given away: `stream`'s queue has a reference."""

    def __deepcopy__(self, memo: dict[int, object]) -> Any:
        values = self.detach().clone()
        is_parameter = isinstance(self, torch.nn.Parameter)
        found = torch.nn.Parameter(values, self.requires_grad) if is_parameter else values
        memo[id(self)] = found
        return found

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"fake {self.raw!r}"

    def __format__(self, spec: str) -> str:
        return format(self.raw.item() if self.raw.dim() == 0 else repr(self), spec)


RUNTIME = Runtime()
RUNTIME.begin()
_LIBRARY = torch.library.Library("_", "IMPL")


def _fallback(func: Any, *args: Any, **kwargs: Any) -> Any:
    return RUNTIME.run(func, args, kwargs)


@functools.cache
def register() -> torch.device:
    """Make the device known to torch, for good: a process with it cannot use a CUDA device."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, RUNTIME)
    _LIBRARY.fallback(_fallback, "PrivateUse1")
    _LIBRARY.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    return torch.device(NAME, 0)
