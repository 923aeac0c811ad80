"""Checkpoints as values: the manifest, nodes' reports of their parts, and imports.

Rules of the manifest:
    - It is JSON. Every field is there, and no other: a newer version says so in `version`.
    - Its `sha256` is that of all other fields, as JSON with sorted keys and without blanks.
    - File names are plain: they stay in the checkpoint's own directory.
    - The parts have every block of a table once. Some blocks may be references: their bytes are in
      another checkpoint's file, under the same root.
    - `bases` names those other checkpoints. A reference leads to bytes, never to another reference.
      A checkpoint without bases is full.
    - `lineage` has the timelines that its cluster continued, newest first. Version 1 has none.
    - `data_sets` has what was done of their present passes. Versions 1 and 2 have none.
    - A table's `spec` is the contract's TableSpec in protobuf's JSON form, which the edge parses.

Rules of a checkpoint that was imported from a plain state dict:
    - A state dict has tensors by name, and no tables. So a table finds its tensors by name, in any
      table of the import, and is refused unless all are there. Shape and dtype have to match; block
      size, order and optimizer are the table's own.
    - Tables of an import are called PREFIX/DTYPE, for the tables PREFIX and PREFIX/...; without a
      prefix they are called DTYPE, for all tables.
    - A tensor without elements is not looked for.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, NoReturn

from ps_core.errors import InvalidCheckpoint
from ps_core.keys import TableId
from ps_core.tables.elements import DType
from ps_core.tables.table_spec import TableSpec, TensorSpec

MANIFEST_FILE = "manifest.json"
"""File name in the checkpoint's directory."""

FORMAT = "pushpull-checkpoint"
VERSION = 3

MAX_LINEAGE_COUNT = 256
"""Timelines in a lineage; the oldest are dropped."""

ID_CHARACTERS = 8
"""Characters of the cluster's id in a directory's name."""

MIN_FILE_BYTES = 10
"""Size of a safetensors file without tensors: a length, and ``{}``."""

_DIRECTORY = re.compile(r"([0-9]{8,})-([A-Za-z0-9_-]{1,8})")
_CLUSTER_ID = re.compile(r".{1,200}")
_FILE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,199}")
_CREATED = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_TIMELINE = re.compile(r"(?:[0-9a-f]{2})*")

MAX_PLACE_CHARACTERS = 240
"""Length of a reference to another checkpoint's file; servers' own names are much shorter."""


@dataclass(frozen=True, slots=True)
class SavedTable:
    """A table: its `spec` in JSON form, its setting at that time, and the last clock in it. A table
    that `is_torn` has each range as of a moment of its own.
    """

    name: str
    spec: Mapping[str, Any]
    consistency: str
    clock: int
    is_torn: bool
    block_count: int


@dataclass(frozen=True, slots=True)
class SavedPart:
    """A server's file.

    Attributes:
        header_sha256: SHA-256 of its bytes up to the end of its header, in hexadecimal digits.
        tables: blocks of each table, references included.
        referred_block_count: blocks that are references.
        referred_byte_count: bytes of these in other checkpoints.
    """

    file: str
    byte_count: int
    header_sha256: str
    tables: Mapping[str, int]
    referred_block_count: int = 0
    referred_byte_count: int = 0


@dataclass(frozen=True, slots=True)
class SavedWorker:
    """A worker's file; `file` is empty without a state, and `problem` says why a state is lost."""

    rank: int
    clock: int
    file: str = ""
    byte_count: int = 0
    header_sha256: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class DataSetSpec:
    """A data set, and the shards that it is cut into: shard n has the samples from n * `shard_size`
    on. `seed` draws the orders in which passes issue them.
    """

    name: str
    sample_count: int
    shard_size: int
    seed: int

    @property
    def shard_count(self) -> int:
        return -(-self.sample_count // self.shard_size)

    def samples(self, shard: int) -> range:
        begin = shard * self.shard_size
        return range(begin, min(begin + self.shard_size, self.sample_count))


@dataclass(frozen=True, slots=True)
class SavedDataSet:
    """The present pass of a data set: the first `issued_count` shards of its order were issued, and
    all of these but `open_shards` are done. `reissued_count` counts the leases that ended without a
    report, in all passes; those of `open_shards` are among them.
    """

    spec: DataSetSpec
    pass_number: int
    issued_count: int
    open_shards: tuple[int, ...]
    reissued_count: int


@dataclass(frozen=True, slots=True)
class ReportedTable:
    """A node's part of one table; `clock` is the highest of its ranges. A part that `is_torn` has
    each range as of a moment of its own.
    """

    block_count: int
    clock: int
    is_torn: bool = False


@dataclass(frozen=True, slots=True)
class PartReport:
    """A node's report: its file, or a problem, or neither if it has nothing to write. Some blocks
    may be references: their number, their bytes, and the directories that have them. A worker's
    `has_parameters` if it has some, or was to have, that no server has.
    """

    file: str = ""
    byte_count: int = 0
    header_sha256: str = ""
    tables: Mapping[TableId, ReportedTable] = field(default_factory=dict)
    problem: str = ""
    referred_block_count: int = 0
    referred_byte_count: int = 0
    bases: tuple[str, ...] = ()
    has_parameters: bool = False


@dataclass(frozen=True)
class Manifest:
    """The manifest; `created` is UTC as 2026-11-22T10:20:00Z, `timeline` is empty for an import.
    `bases` are the other directories that have blocks of it, ascending.
    """

    number: int
    created: str
    reason: str
    cluster_id: str
    timeline: bytes
    worker_count: int
    tables: tuple[SavedTable, ...]
    parts: tuple[SavedPart, ...]
    workers: tuple[SavedWorker, ...]
    bases: tuple[str, ...] = ()
    lineage: tuple[bytes, ...] = ()
    data_sets: tuple[SavedDataSet, ...] = ()

    @property
    def run(self) -> frozenset[bytes]:
        """Timelines of the checkpoint's run."""
        return frozenset((self.timeline, *self.lineage)) - {b""}

    @property
    def lost_ranks(self) -> frozenset[int]:
        """Workers whose states are lost in it."""
        return frozenset(worker.rank for worker in self.workers if worker.problem)

    @property
    def is_imported(self) -> bool:
        """True if it was made from a plain state dict, so is on no cluster's timeline."""
        return not self.timeline

    @property
    def is_full(self) -> bool:
        return not self.bases

    @property
    def referred_byte_count(self) -> int:
        """Bytes of the blocks in other directories."""
        return sum(part.referred_byte_count for part in self.parts)

    @property
    def referred_block_count(self) -> int:
        """Blocks in other directories."""
        return sum(part.referred_block_count for part in self.parts)

    @property
    def directory(self) -> str:
        return directory_name(self.number, self.cluster_id)

    @cached_property
    def files(self) -> dict[str, SavedPart | SavedWorker]:
        """Files beside the manifest, by name."""
        found: tuple[SavedPart | SavedWorker, ...] = (*self.parts, *self.workers)
        return {saved.file: saved for saved in found if saved.file}

    @property
    def byte_count(self) -> int:
        return sum(saved.byte_count for saved in self.files.values())

    @cached_property
    def _tables(self) -> dict[str, SavedTable]:
        return {table.name: table for table in self.tables}

    def table(self, name: str) -> SavedTable:
        """A table by name; InvalidCheckpoint has the names of the others if it does not exist."""
        if name not in self._tables:
            there = ", ".join(f"'{known}'" for known in self._tables) or "none"
            raise InvalidCheckpoint(
                f"checkpoint {self.directory} has no table '{name}'; expected one of: {there}"
            )
        return self._tables[name]


def imported_name(prefix: str, dtype: DType) -> str:
    """Name of the imported table of a dtype."""
    return f"{prefix}/{dtype.value}" if prefix else dtype.value


class ImportedRows(NamedTuple):
    """The names of the tensors with the rows of a table, and with their ids; None: the id of a row
    is its place.
    """

    rows: str
    ids: str | None = None


def has_ids(name: str, names: Container[str]) -> bool:
    """True if an imported tensor has ids of rows: their 64 bits lie in what is float64 by name."""
    stem, _, last = name.rpartition("/")
    return last == "ids" and f"{stem}/rows" in names


@dataclass(frozen=True, slots=True)
class Imported:
    """The tensors of an import in the checkpoint at `url`, by name, with the table of each: for the
    tables with a prefix; empty: all tables.
    """

    url: str
    prefix: str
    tensors: Mapping[str, tuple[TableSpec, TensorSpec]]

    @classmethod
    def of(cls, url: str, tables: Iterable[TableSpec]) -> Imported:
        found: dict[str, tuple[TableSpec, TensorSpec]] = {}
        prefix = ""
        for spec in tables:
            prefix = spec.name.rpartition("/")[0]
            for tensor in spec.tensors:
                found[tensor.name] = spec, tensor
        return cls(url, prefix, found)

    def is_for(self, table: str) -> bool:
        """True if the import is for a table of that name."""
        return not self.prefix or table == self.prefix or table.startswith(f"{self.prefix}/")

    def places(self, spec: TableSpec) -> dict[str, tuple[str, int]]:
        """The table here, and the first element in it, of each tensor of `spec`;
        InvalidCheckpoint if one is missing, or differs.
        """
        return {
            tensor.name: self._place(spec, tensor)
            for tensor in spec.tensors
            if tensor.element_count
        }

    def _place(self, spec: TableSpec, tensor: TensorSpec) -> tuple[str, int]:
        what = f"tensor '{tensor.name}' of table '{spec.name}'"
        if tensor.name not in self.tensors:
            raise InvalidCheckpoint(
                f"{what} is not in {self.url}, which was imported for {self._covers}; expected all "
                "of the table's tensors, or an import with --prefix, the name of one model"
            )
        source, found = self.tensors[tensor.name]
        came = f"{found.shape} of {source.dtype.value}"
        expected = f"{tensor.shape} of {spec.dtype.value}"
        if came != expected:
            raise InvalidCheckpoint(f"{what} is {came} in {self.url}; expected {expected}")
        return source.name, found.offset

    def check(self, spec: TableSpec) -> None:
        """InvalidCheckpoint if the table's values are not here."""
        if spec.rows is None:
            self.places(spec)
        else:
            self.rows_of(spec)

    def rows_of(self, spec: TableSpec) -> ImportedRows:
        """The tensors here that have the rows of `spec`; InvalidCheckpoint if there are none, or of
        another shape.
        """
        what, names = f"table '{spec.name}'", self._row_names(spec.name)
        for found in names:
            if found.rows not in self.tensors or found.ids not in (None, *self.tensors):
                continue
            source, tensor = self.tensors[found.rows]
            is_other = source.dtype is not spec.dtype and bool(tensor.element_count)
            if tensor.shape[1:] != (spec.element_count,) or is_other:
                raise InvalidCheckpoint(
                    f"tensor '{found.rows}', with the rows of {what}, is {tensor.shape} of "
                    f"{source.dtype.value} in {self.url}; expected (rows, {spec.element_count}) of "
                    f"{spec.dtype.value}"
                )
            if found.ids is not None:
                ids = self.tensors[found.ids][1].shape
                if ids != tensor.shape[:1]:
                    raise InvalidCheckpoint(
                        f"tensor '{found.ids}' is {ids} in {self.url}; expected "
                        f"{tensor.shape[:1]}, as many as '{found.rows}' has rows"
                    )
            return found
        shown = " or ".join(f"'{each.rows}'" for each in dict.fromkeys(names))
        raise InvalidCheckpoint(
            f"the rows of {what} are not in {self.url}, which was imported for {self._covers}; "
            f"expected {shown}, or an import with --prefix, the name of one model"
        )

    def _row_names(self, table: str) -> list[ImportedRows]:
        """The names that rows of a table may have here: those of `export`, and torch's."""
        short = table.removeprefix(f"{self.prefix}/") if self.prefix else table
        names = dict.fromkeys((table, short))
        pairs = [ImportedRows(f"{name}/rows", f"{name}/ids") for name in names]
        return [*pairs, *(ImportedRows(f"{n}.weight") for n in names), *map(ImportedRows, names)]

    @property
    def _covers(self) -> str:
        return f"the tables of '{self.prefix}'" if self.prefix else "all tables"

    def unknown(self, names: Iterable[str]) -> Iterator[str]:
        """Tensors of the import outside `names`."""
        known = set(names)
        return (name for name in self.tensors if name not in known)


def directory_name(number: int, cluster_id: str) -> str:
    short = re.sub(r"[^A-Za-z0-9_-]", "-", cluster_id[:ID_CHARACTERS])
    return f"{number:08d}-{short}"


def left_directory_name(cluster_id: str) -> str:
    """Name of the directory, beside those of checkpoints, for the state of workers that leave."""
    return f"left-{directory_name(0, cluster_id).partition('-')[2]}"


def place_in(directory: str, file: str) -> str:
    """A reference to a file of another checkpoint under the same root."""
    return f"{directory}/{file}"


def split_place(place: str) -> tuple[str, str] | None:
    """Directory and file of a reference, or None if it is malformed."""
    directory, _, file = place.partition("/")
    if not is_file_name(file) or number_of(directory) is None or len(place) > MAX_PLACE_CHARACTERS:
        return None
    return directory, file


def is_file_name(name: str) -> bool:
    """True for the plain name of a part, which stays in the checkpoint's directory."""
    return _FILE.fullmatch(name) is not None and name != MANIFEST_FILE


def number_of(directory: str) -> int | None:
    """Number of the checkpoint with that directory's name, or None for another name."""
    found = _DIRECTORY.fullmatch(directory)
    return int(found[1]) if found else None


def to_json(manifest: Manifest) -> str:
    """The text of a manifest; InvalidCheckpoint if `from_json` would refuse it."""
    fields = {
        "format": FORMAT,
        "version": VERSION,
        "number": manifest.number,
        "created": manifest.created,
        "reason": manifest.reason,
        "cluster_id": manifest.cluster_id,
        "timeline": manifest.timeline.hex(),
        "worker_count": manifest.worker_count,
        "bases": list(manifest.bases),
        "lineage": [timeline.hex() for timeline in manifest.lineage],
        "tables": [_fields_of(table) for table in manifest.tables],
        "parts": [_fields_of(part) for part in manifest.parts],
        "workers": [_fields_of(worker) for worker in manifest.workers],
        "data_sets": [_data_set_fields(saved) for saved in manifest.data_sets],
    }
    try:
        text = json.dumps({**fields, "sha256": _digest(fields)}, indent=1)
    except (TypeError, ValueError) as error:
        raise InvalidCheckpoint(f"a manifest cannot be written as JSON: {error}") from None
    from_json(text, f"the manifest of checkpoint {manifest.number}")
    return text


def from_json(text: str, where: str) -> Manifest:
    """Parse the manifest at `where`; InvalidCheckpoint if it is damaged, newer or contradictory."""
    try:
        document = json.loads(text, object_pairs_hook=once_each, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise InvalidCheckpoint(f"{where} is not a manifest: {reason}; expected JSON") from None
    fields = _Fields(document, where)
    came = fields.take("format", str)
    if came != FORMAT:
        fields.refuse("format", came, f"'{FORMAT}'")
    version = fields.count("version", least=1)
    if version > VERSION:
        fields.refuse("version", version, f"at most {VERSION}: a newer pushpull wrote it")
    digest = fields.matching("sha256", _SHA256, "64 hexadecimal digits")
    actual = _digest({name: value for name, value in document.items() if name != "sha256"})
    if digest != actual:
        fields.refuse("sha256", digest, f"{actual}: the manifest is damaged")
    manifest = Manifest(
        number=fields.count("number", least=1),
        created=fields.matching("created", _CREATED, "a time such as 2026-11-22T10:20:00Z"),
        reason=fields.take("reason", str),
        cluster_id=fields.matching("cluster_id", _CLUSTER_ID, "1 to 200 characters"),
        timeline=bytes.fromhex(fields.matching("timeline", _TIMELINE, "hexadecimal digits")),
        worker_count=fields.count("worker_count"),
        bases=_bases_of(fields),
        lineage=_lineage_of(fields) if version > 1 else (),
        tables=tuple(map(_table_of, fields.entries("tables"))),
        parts=tuple(map(_part_of, fields.entries("parts"))),
        workers=tuple(map(_worker_of, fields.entries("workers"))),
        data_sets=tuple(map(_data_set_of, fields.entries("data_sets"))) if version > 2 else (),
    )
    fields.finish()
    _check_whole(manifest, where)
    return manifest


def once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An `object_pairs_hook` of `json.loads` that raises ValueError for a repeated field."""
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the field {twice!r} is there twice")
    return found


def _fields_of(saved: SavedTable | SavedPart | SavedWorker) -> dict[str, Any]:
    values = {name: getattr(saved, name) for name in saved.__slots__}
    return {name: dict(v) if isinstance(v, Mapping) else v for name, v in values.items()}


def _data_set_fields(saved: SavedDataSet) -> dict[str, Any]:
    spec = {name: getattr(saved.spec, name) for name in saved.spec.__slots__}
    own = {name: getattr(saved, name) for name in saved.__slots__ if name != "spec"}
    return {**spec, **own, "open_shards": list(saved.open_shards)}


def _digest(fields: Mapping[str, Any]) -> str:
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


class _Fields:
    """The fields of one JSON object, each taken once."""

    def __init__(self, document: object, where: str) -> None:
        if not isinstance(document, dict):
            raise InvalidCheckpoint(f"{where} is {_kind(document)}; expected a JSON object")
        self._left = dict(document)
        self.where = where

    def refuse(self, field: str, came: object, expected: str) -> NoReturn:
        shown = repr(came)
        shown = shown if len(shown) <= 100 else f"{shown[:100]}..."
        raise InvalidCheckpoint(f"{self.where}: {field} is {shown}; expected {expected}")

    def take(self, field: str, kind: type) -> Any:
        if field not in self._left:
            raise InvalidCheckpoint(f"{self.where}: {field} is missing; expected {_NAMES[kind]}")
        value = self._left.pop(field)
        if type(value) is not kind:
            self.refuse(field, value, _NAMES[kind])
        return value

    def count(self, field: str, least: int = 0) -> int:
        value = self.take(field, int)
        if value < least:
            self.refuse(field, value, f"at least {least}")
        return int(value)

    def matching(self, field: str, pattern: re.Pattern[str], expected: str) -> str:
        value = self.take(field, str)
        if not pattern.fullmatch(value):
            self.refuse(field, value, expected)
        return str(value)

    def entries(self, field: str) -> Iterator[_Fields]:
        for index, entry in enumerate(self.take(field, list)):
            inner = _Fields(entry, f"{self.where}: {field}[{index}]")
            yield inner
            inner.finish()

    def finish(self) -> None:
        for name in self._left:
            raise InvalidCheckpoint(
                f"{self.where}: there is a field {name!r}; expected none of that name"
            )


_NAMES: dict[type, str] = {
    str: "a string", int: "an integer", bool: "true or false", dict: "an object", list: "a list",
}  # fmt: skip


def _kind(value: object) -> str:
    return _NAMES.get(type(value), "null" if value is None else "a number")


def _table_of(fields: _Fields) -> SavedTable:
    name = fields.take("name", str)
    if not name:
        fields.refuse("name", name, "a name")
    return SavedTable(
        name=name,
        spec=fields.take("spec", dict),
        consistency=fields.take("consistency", str),
        clock=fields.count("clock"),
        is_torn=fields.take("is_torn", bool),
        block_count=fields.count("block_count", least=1),
    )


def _lineage_of(fields: _Fields) -> tuple[bytes, ...]:
    found = fields.take("lineage", list)
    if len(found) > MAX_LINEAGE_COUNT:
        fields.refuse("lineage", len(found), f"at most {MAX_LINEAGE_COUNT} timelines")
    for timeline in found:
        if not isinstance(timeline, str) or not timeline or not _TIMELINE.fullmatch(timeline):
            fields.refuse("lineage", found, "timelines in hexadecimal digits")
    return tuple(map(bytes.fromhex, found))


def _bases_of(fields: _Fields) -> tuple[str, ...]:
    found = fields.take("bases", list)
    for base in found:
        if type(base) is not str or number_of(base) is None:
            fields.refuse("bases", found, "the names of checkpoints' directories")
    if sorted(set(found)) != found:
        fields.refuse("bases", found, "each once, ascending")
    return tuple(found)


def _file_of(fields: _Fields) -> tuple[str, int, str]:
    file = fields.matching("file", _FILE, "the plain name of a file")
    if file == MANIFEST_FILE:
        fields.refuse("file", file, "another name than the manifest's")
    byte_count = fields.count("byte_count", least=MIN_FILE_BYTES)
    return file, byte_count, fields.matching("header_sha256", _SHA256, "64 hexadecimal digits")


def _part_of(fields: _Fields) -> SavedPart:
    file, byte_count, header_sha256 = _file_of(fields)
    inner = _Fields(fields.take("tables", dict), f"{fields.where}: tables")
    tables = {name: inner.count(name, least=1) for name in tuple(inner._left)}
    blocks, elsewhere = fields.count("referred_block_count"), fields.count("referred_byte_count")
    if blocks > sum(tables.values()):
        fields.refuse("referred_block_count", blocks, f"at most its blocks, {sum(tables.values())}")
    if elsewhere and not blocks:  # partitions without rows have no bytes
        fields.refuse("referred_byte_count", elsewhere, f"those of {blocks} blocks")
    return SavedPart(file, byte_count, header_sha256, tables, blocks, elsewhere)


def _worker_of(fields: _Fields) -> SavedWorker:
    rank, clock = fields.count("rank"), fields.count("clock")
    problem = fields.take("problem", str)
    if fields._left.get("file") == "":
        fields.take("file", str)
        for name, nothing in (("byte_count", 0), ("header_sha256", "")):
            came = fields.take(name, type(nothing))
            if came != nothing:
                fields.refuse(name, came, f"{nothing!r}, as there is no file")
        return SavedWorker(rank, clock, problem=problem)
    if problem:
        fields.refuse("problem", problem, "none, as there is a file")
    return SavedWorker(rank, clock, *_file_of(fields))


def _data_set_of(fields: _Fields) -> SavedDataSet:
    name, sample_count = fields.take("name", str), fields.count("sample_count", least=1)
    shard_size = fields.count("shard_size", least=1)
    spec = DataSetSpec(name, sample_count, shard_size, fields.count("seed"))
    pass_number, issued_count = fields.count("pass_number"), fields.count("issued_count")
    if issued_count > spec.shard_count:
        fields.refuse("issued_count", issued_count, f"at most its shards, {spec.shard_count}")
    shards = fields.take("open_shards", list)
    are_shards = all(type(n) is int and 0 <= n < spec.shard_count for n in shards)
    if not are_shards or len(set(shards)) != len(shards) or len(shards) > issued_count:
        fields.refuse("open_shards", shards, f"some of {issued_count} issued shards, each once")
    reissued_count = fields.count("reissued_count")
    return SavedDataSet(spec, pass_number, issued_count, tuple(shards), reissued_count)


def _check_whole(manifest: Manifest, where: str) -> None:
    _check_once((table.name for table in manifest.tables), f"{where}: two tables are named")
    _check_once((worker.rank for worker in manifest.workers), f"{where}: two workers have rank")
    names = (saved.spec.name for saved in manifest.data_sets)
    _check_once(names, f"{where}: two data sets are named")
    if manifest.directory in manifest.bases:
        raise InvalidCheckpoint(f"{where}: it is its own base; expected other checkpoints")
    if bool(manifest.bases) != bool(manifest.referred_block_count):
        raise InvalidCheckpoint(
            f"{where}: it has {len(manifest.bases)} bases for {manifest.referred_block_count} "
            "blocks that are referred to; expected both or neither"
        )
    files = [p.file for p in manifest.parts] + [w.file for w in manifest.workers if w.file]
    _check_once(files, f"{where}: two parts are in the file")
    present: Counter[str] = Counter()
    for part in manifest.parts:
        present.update(part.tables)
    tables = {table.name: table.block_count for table in manifest.tables}
    for name in present.keys() - tables.keys():
        raise InvalidCheckpoint(f"{where}: parts have blocks of a table '{name}'; there is none")
    for name, count in tables.items():
        if present[name] != count:
            raise InvalidCheckpoint(
                f"{where}: the parts have {present[name]} blocks of table '{name}'; expected its "
                f"block_count, {count}"
            )


def _check_once(names: Iterable[object], what: str) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise InvalidCheckpoint(f"{what} {name!r}; expected one")
