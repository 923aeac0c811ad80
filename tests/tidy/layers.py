"""Which layer each module is in, and what each layer may know.

L0 `ps_core` <- L1 the rooms that decide <- L2 what touches the world <- L3 entry points. A room is
a folder of a package; `pyproject.toml` (import-linter) says which room may import which.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.tidy.source import Finding, Source

PURE_ROOMS = {
    "ps_runtime.http2.protocol",
    "ps_server.ranges",
    "ps_server.replication",
    "ps_server.rows",
    "ps_server.values",
    "ps_worker.compression",
    "ps_worker.embedding",
    "ps_worker.spec",
    "ps_worker.window",
    "scheduler.machine",
    "scheduler.journal",
}
"""L1: they decide; time, randomness and input are arguments, and what to do is returned."""

ENTRY_MODULES = {"__main__", "process"}
"""L3 of the roles; `process` is what `__main__` runs, where that has to prepare the imports."""

ROLES = ("scheduler", "ps_server", "ps_worker")

REPLAY = "ps_server.replay.replayer"
"""What the command line may know of servers: it makes again what they made, and serves nobody."""

BENCH = "ps_cli.bench"
"""What measures the code behind the public API imports that code."""

IMPURE = {
    "asyncio", "ctypes", "datetime", "grpc", "google", "http", "io", "logging", "multiprocessing",
    "os", "pathlib", "prometheus_client", "pushpull", "queue", "secrets", "select", "shutil",
    "signal", "socket", "subprocess", "sys", "tempfile", "threading", "time", "urllib", "uuid",
    "uvloop", "concurrent", "fcntl", "mmap", "rich", "typer", "random",
}  # fmt: skip
"""What L0 and L1 never import."""

PURE_EXCEPTIONS = {"random.Random", "sys.byteorder", "urllib.parse.unquote_to_bytes"}
"""The type of a generator that is passed in, a constant, and a function of its argument alone."""


def layer_of(module: str) -> int:
    """The layer of a shipped module, or of a name in one."""
    package, _, rest = module.partition(".")
    if package == "ps_core":
        return 0
    if package in ("ps_cli", "pushpull") or rest in ENTRY_MODULES:
        return 3
    return 1 if any(f"{module}.".startswith(f"{room}.") for room in PURE_ROOMS) else 2


def check_layers(source: Source) -> Iterator[Finding]:
    """Imports point down only, roles never import each other, and L0 and L1 know no world."""
    if not source.is_shipped:
        return
    layer = layer_of(source.module)
    for imported in source.imports:
        for message in _breaches(source, layer, imported.module, imported.dotted):
            yield Finding(source.path, imported.line, message)


def _breaches(source: Source, layer: int, module: str, dotted: str) -> Iterator[str]:
    root = module.split(".", maxsplit=1)[0]
    if layer <= 1 and root in IMPURE and dotted not in PURE_EXCEPTIONS:
        yield f"L{layer} imports {dotted}, which touches the world"
    if layer == 0 and root == "torch":
        yield "L0 imports torch; it knows the standard library and numpy"
    if source.package == "scheduler" and root == "torch":
        yield "the scheduler imports torch"
    if root in ROLES and source.package in ROLES and root != source.package:
        yield f"role {source.package} imports role {root}"
    if source.package == "ps_runtime" and root in (*ROLES, "ps_cli"):
        yield f"the edge imports {root}, which stands above it"
    is_behind = source.package == "ps_cli" and not source.module.startswith(f"{BENCH}.")
    if is_behind and root in ("scheduler", "ps_server") and module != REPLAY:
        yield f"the command line imports {dotted}; it starts that role as a process"
    if is_behind and module.startswith("ps_worker."):
        yield f"the command line imports {dotted}; it may know ps_worker's public names only"
    is_ours = root in ("ps_core", "ps_runtime", "ps_cli", *ROLES)
    target = max(layer_of(module), layer_of(dotted)) if module in ROLES else layer_of(module)
    if is_ours and target > layer:
        yield f"L{layer} imports {dotted} of L{target}; imports point down"
