"""`pushpull checkpoint import`: a plain state dict as a checkpoint that a run can start from.

Rules:
    - A file is known by its content, whatever its name. Nothing is unpickled: what torch.save made
      is loaded with `weights_only`.
    - There is one table for each element type, with its tensors in the order of the file; integers
      and booleans are float64, as the buffers of a model are. At most one tensor is in memory.
    - Everything is read again before the manifest is written; a failed import removes its files.
      One that is killed leaves them, and the next one in that place replaces them.
    - Ids of rows (NAME/ids beside NAME/rows) keep their 64 bits, in what is float64 by name.
    - A run takes its initial values by tensor name when a script makes its tables
      (`ps_core.manifest`): an imported table has no model.
"""

from __future__ import annotations

import contextlib
import re
import time
import warnings
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from google.protobuf.json_format import MessageToDict

from ps_cli.console.output import Output
from ps_cli.console.words import size
from ps_core.consistency import Consistency
from ps_core.errors import InvalidCheckpoint, InvalidConfig, PushpullError
from ps_core.manifest import Manifest, SavedPart, SavedTable, has_ids, imported_name, number_of
from ps_core.tables.elements import DType
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_core.tables.table_spec import TableSpec, TensorSpec
from ps_runtime.checkpoint.directory import CheckpointDirectory, locate
from ps_runtime.checkpoint.part_file import LENGTH_BYTES, VALUES
from ps_runtime.checkpoint.part_writer import PartWriter, PlannedTable
from ps_runtime.checkpoint.reader import problems_with
from ps_runtime.checkpoint.store import CheckpointStore
from ps_runtime.cluster.wire import spec_to_proto

if TYPE_CHECKING:
    import torch

NUMBER = 1
CLUSTER_ID = "imported"
FILE = "imported.safetensors"

_EXPECTED = (
    "expected a safetensors file, or what torch.save makes of model.state_dict() and nothing else"
)

_PICKLED = re.compile(r"GLOBAL ([\w.]+) ")
"""In torch's error: the class of an object that it does not load."""

_BLOCK_ELEMENTS = 65_536
"""To read a small tensor, a run reads a whole block."""


@dataclass(frozen=True, slots=True)
class _Source:
    """A tensor of the file; `read` reads its elements."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]


def import_model(file: Path, url: str, prefix: str, output: Output) -> int:
    """Write a state dict's tensors as a checkpoint, and print its directory."""
    if prefix.strip("/") != prefix:
        raise InvalidConfig(f"prefix is '{prefix}'; expected a name such as 'model'")
    store = _empty_store(url)
    with _opened(file) as sources:
        if not any(_count(each) for each in sources):
            raise InvalidConfig(f"{file} has no tensor with elements; expected a model's state")
        manifest = _write(store, sources, prefix, f"imported from {file.name}")
    where = store.named(manifest.directory).url
    output.say(f"{where}: {len(sources)} tensors of {file} ({size(manifest.byte_count)})")
    return 0


def _empty_store(url: str) -> CheckpointStore:
    location = locate(url)
    if number_of(location.name) is not None or CheckpointDirectory(location).has_manifest():
        raise InvalidConfig(f"{location.url} is a checkpoint's own directory; expected a root")
    store = CheckpointStore(location)
    own = store.directory(NUMBER, CLUSTER_ID)
    # An import that was killed leaves its directory; on this machine one under way holds it.
    is_broken_off = location.is_local and not own.has_manifest()
    names = [name for name in store.names() if name != own.name or not is_broken_off]
    if names:
        raise InvalidConfig(
            f"{store.url} has checkpoints already, complete or not, the newest {names[-1]}; "
            "expected a place of its own, since a run that starts from it takes the newest"
        )
    return store


# --- the file that is read


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[list[_Source]]:
    # Imported here, because other commands start without torch.
    import torch
    from safetensors import SafetensorError, safe_open

    with contextlib.ExitStack() as stack:
        try:
            if _is_safetensors(file):
                opened = stack.enter_context(safe_open(file, framework="pt"))
                tensor_of = opened.get_tensor
                # Each is read, and freed: only then is its type known.
                names = set(opened.keys())
                sources = [
                    _source(file, name, tensor_of(name), partial(tensor_of, name), names)
                    for name in opened.keys()  # noqa: SIM118 - it is no mapping
                ]
            else:
                raw = stack.enter_context(file.open("rb"))  # by its name, torch would judge it
                with warnings.catch_warnings(action="ignore"):  # they advise on torch.load
                    found = torch.load(raw, map_location="cpu", weights_only=True)
                if not isinstance(found, Mapping):
                    said = type(found).__name__
                    raise InvalidConfig(f"{file} is a {said}; expected a state dict")
                sources = [
                    _source(file, name, each, partial(found.__getitem__, name), found)
                    for name, each in found.items()
                ]
        except (OSError, SafetensorError) as error:
            raise InvalidConfig(f"{file} cannot be read: {error}") from None
        except PushpullError:
            raise
        except Exception as error:  # noqa: BLE001 - torch.load raises any for a foreign file
            raise InvalidConfig(f"{file} {_why_unread(error)}") from None
        yield sources


def _why_unread(error: Exception) -> str:
    """The reason why torch.load cannot read a file, without torch's advice to unpickle it."""
    said = str(error)
    if "TorchScript archives" in said:
        return f"is a TorchScript archive; {_EXPECTED}"
    if pickled := _PICKLED.search(said):
        return f"has a pickled {pickled[1]}, and nothing is unpickled; {_EXPECTED}"
    if isinstance(error, RuntimeError) and said:
        return f"cannot be read: {said.splitlines()[0]}; {_EXPECTED}"
    reason = "it is no file of torch.save, or it has other objects than tensors"
    return f"cannot be read: {reason}; {_EXPECTED}"


def _is_safetensors(file: Path) -> bool:
    """True if the file begins with the length of a header, and the header's brace."""
    with file.open("rb") as opened:
        return opened.read(LENGTH_BYTES + 1)[LENGTH_BYTES:] == b"{"


def _source(
    file: Path,
    name: object,
    value: object,
    read: Callable[[], torch.Tensor],
    names: Container[str],
) -> _Source:
    import torch

    if not isinstance(name, str) or not isinstance(value, torch.Tensor):
        raise InvalidConfig(
            f"{file}: {name!r} is a {type(value).__name__}; expected names and tensors alone, as "
            "module.state_dict() has them"
        )
    if has_ids(name, names):
        if value.dtype not in (torch.int64, torch.uint64) or value.dim() != 1:
            raise InvalidConfig(
                f"{file}: tensor '{name}' is {value.dtype} of shape {tuple(value.shape)}; expected "
                "int64 ids of rows, one for each"
            )
        shape = tuple(value.shape)
        return _Source(name, DType.FLOAT64, shape, lambda: read().contiguous().view(torch.float64))
    dtype = _dtype_of(value)
    if dtype is None or value.layout is not torch.strided or value.is_quantized:
        raise InvalidConfig(
            f"{file}: tensor '{name}' is {value.dtype} ({value.layout}); expected a dense one of "
            "float32, float16, bfloat16, float64, integers or booleans"
        )
    is_integer = not value.dtype.is_floating_point
    if is_integer and not torch.equal(value.to(torch.float64).to(value.dtype), value):
        raise InvalidConfig(
            f"{file}: tensor '{name}' has integers that float64, in which tables keep them, cannot "
            "hold"
        )
    return _Source(name, dtype, tuple(value.shape), read)


def _dtype_of(tensor: torch.Tensor) -> DType | None:
    """The type of the table that holds such tensors; None if none can."""
    name = str(tensor.dtype).removeprefix("torch.")
    if name in {dtype.value for dtype in DType}:
        return DType(name)
    is_integer = not tensor.dtype.is_floating_point and not tensor.dtype.is_complex
    return DType.FLOAT64 if is_integer else None


def _count(source: _Source) -> int:
    return TensorSpec(source.name, source.shape, 0).element_count


# --- the checkpoint that is written


def _write(
    store: CheckpointStore, sources: Sequence[_Source], prefix: str, reason: str
) -> Manifest:
    by_dtype = _by_table(sources)
    specs = {
        dtype: _spec_of(imported_name(prefix, dtype), dtype, found)
        for dtype, found in by_dtype.items()
    }
    directory = store.directory(NUMBER, CLUSTER_ID)
    saved = tuple(map(_saved, specs.values()))
    with directory.made():
        part = _part(directory, saved, {specs[dtype]: by_dtype[dtype] for dtype in specs})
        manifest = Manifest(
            number=NUMBER,
            created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            reason=reason,
            cluster_id=CLUSTER_ID,
            timeline=b"",
            worker_count=0,
            tables=saved,
            parts=(part,),
            workers=(),
        )
        problems = problems_with(directory, manifest)
        if problems:
            raise InvalidCheckpoint(f"the written checkpoint is not good: {problems[0]}")
        directory.write_manifest(manifest)
    return manifest


def _by_table(sources: Sequence[_Source]) -> dict[DType, list[_Source]]:
    """The tensors of each table, by its type. A table has an element: tensors of a type of which
    none has one (a table of rows that had no rows) lie in the first.
    """
    found: dict[DType, list[_Source]] = {each.dtype: [] for each in sources if _count(each)}
    for source in sources:
        found.get(source.dtype, next(iter(found.values()))).append(source)
    return found


def _spec_of(name: str, dtype: DType, sources: Sequence[_Source]) -> TableSpec:
    tensors, end = [], 0
    for source in sources:
        tensors.append(TensorSpec(source.name, source.shape, end))
        end += tensors[-1].element_count
    # The script chooses the optimizer; this one has values and no state.
    optimizer = OptimizerSpec(OptimizerKind.ASSIGN)
    return TableSpec(name, dtype, end, optimizer, _BLOCK_ELEMENTS, tuple(tensors)).validated()


def _saved(spec: TableSpec) -> SavedTable:
    fields = MessageToDict(spec_to_proto(spec), preserving_proto_field_name=True)
    count = -(-spec.element_count // spec.block_elements)
    return SavedTable(spec.name, fields, str(Consistency()), 0, False, count)


def _part(
    directory: CheckpointDirectory,
    saved: Sequence[SavedTable],
    tables: Mapping[TableSpec, list[_Source]],
) -> SavedPart:
    path = directory.begin(FILE)
    counts = {table.name: table.block_count for table in saved}
    writer = PartWriter(path, [PlannedTable(n, count, (VALUES,)) for n, count in counts.items()])
    try:
        # Wide elements come first, so that all are aligned.
        for spec in sorted(tables, key=lambda each: -each.accumulator_element_bytes):
            for block, payload in enumerate(_blocks(spec, tables[spec])):
                wide = "F64" if spec.dtype is DType.FLOAT64 else "F32"
                writer.append(spec.name, block, VALUES, payload, wide)
                writer.note_block(spec.name, block, version=0, steps=(0,))
        written = writer.finish(NUMBER, CLUSTER_ID)
    finally:
        writer.abort()
    directory.commit(FILE, path)
    return SavedPart(FILE, written.byte_count, written.header_sha256, counts)


def _blocks(spec: TableSpec, sources: Sequence[_Source]) -> Iterator[memoryview]:
    import torch

    wide = torch.float64 if spec.dtype is DType.FLOAT64 else torch.float32
    rest = torch.empty(0, dtype=wide)
    for source in sources:
        flat = torch.cat((rest, source.read().detach().reshape(-1).to(wide)))
        whole = flat.numel() - flat.numel() % spec.block_elements
        for begin in range(0, whole, spec.block_elements):
            yield flat[begin : begin + spec.block_elements].numpy().data.cast("B")
        rest = flat[whole:].clone()
    if rest.numel():
        yield rest.numpy().data.cast("B")
