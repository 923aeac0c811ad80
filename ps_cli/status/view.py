"""The view of `pushpull status` for a person: a pure function of the status document."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ps_cli.console.progress import duration
from ps_cli.console.words import UNKNOWN, size
from ps_cli.runs.entries import run_line
from ps_cli.status.document import (
    CheckpointsEntry,
    DataSetEntry,
    KeptValuesEntry,
    NodeEntry,
    ServerEntry,
    StatusDocument,
    TableEntry,
    WaitEntry,
)

MAX_WAIT_COUNT = 20
"""Waits that are listed; more are counted."""


def status_view(document: StatusDocument) -> RenderableType:
    parts: list[RenderableType] = [
        _head(document),
        *([Text(f"lost: {document['lost']}", "bold red")] if document["lost"] else []),
        *([Text(f"waiting: {document['awaited']}", "red")] if document["awaited"] else []),
        *_checkpoints(document["checkpoints"]),
        *map(_kept_values, document["kept_values"]),
        *map(_data_set, document["data_sets"]),
    ]
    are_replicated = document["replica_count"] > 1
    servers = _servers(document["servers"], document["nodes"], are_replicated=are_replicated)
    sections = (
        ("servers", servers),
        ("workers and readers", _clients(document["nodes"])),
        ("tables", _tables(document["tables"])),
    )
    for title, table in sections:
        parts += ["", Text(title, style="bold"), table if table.row_count else Text("  none yet")]
        if title == "servers":  # the reason of one that is silent is too long for a column
            parts += [
                Text(f"  server {server['node_id']} does not answer: {server['error']}", "yellow")
                for server in document["servers"]
                if server["error"]
            ]
    parts += ["", Text("waits", style="bold"), _waits(document["waits"])]
    return Group(*parts)


def _head(document: StatusDocument) -> Text:
    alive = [node for node in document["nodes"] if node["state"] == "alive" and not node["run"]]
    counts = {role: sum(node["role"] == role for node in alive) for role in ("server", "worker")}
    text = Text.assemble(
        ("cluster ", "bold"),
        document["cluster_id"],
        f"  view {document['view_number']}",
        f"  servers {counts['server']} of {document['server_count']}",
        f"  workers {counts['worker']} of {document['world_size']}",
    )
    if document["replica_count"] > 1:
        text.append(f"  replicas {document['replica_count']} ")
        text.append(f"(at least {document['min_in_sync']} in sync)")
    if document["restored_from"]:
        text.append(f"\nstarted from {document['restored_from']}")
    if document["checkpoint"]:
        text.append(f"\nmaking checkpoint {document['checkpoint']}")
    if document["is_finished"]:
        text.append("  finished", style="green")
    for run in document["runs"]:
        text.append(f"\n{run_line(run)}")
    if document["degraded_range_count"]:
        text.append(f"\n{_degraded(document)}", style="yellow")
    if document["unserved_ranges"]:
        ranges = ", ".join(document["unserved_ranges"])
        text.append(f"\nno server has ranges {ranges}, which hold blocks of tables", "yellow")
    return text


def _checkpoints(entry: CheckpointsEntry | None) -> list[Text]:
    """A line for the newest complete checkpoint, and one for the last that failed."""
    if entry is None:
        return []
    since = "since the scheduler was started again" if entry["unknown_before"] else "yet"
    state = f"go to {entry['url']}; none is complete {since}"
    if entry["newest"] is not None:
        ago = _ago(entry["newest_age_s"])
        state = f"{entry['complete_count']} complete, the newest {ago}: {entry['newest']}"
    lines = [Text(f"checkpoints {state}")]
    if entry["failure"] is not None:
        last = f"checkpoint {entry['failed_number']}, {_ago(entry['failure_age_s'])}"
        failed = f"checkpoints {entry['failed_count']} failed; {last}: {entry['failure']}"
        lines.append(Text(failed, "red"))
    return lines


def _kept_values(entry: KeptValuesEntry) -> Text:
    remedy = "make room for its temporary files to save them, or stop it if they are not needed"
    if entry["file"] is not None:
        remedy = f"pushpull checkpoint rescue {entry['file']} OUT.safetensors there, then stop it"
    return Text(
        f"server at {entry['address']} is none of this cluster's: it keeps the values of cluster "
        f"{entry['cluster_id']}, which was here before; {remedy}",
        "red",
    )


def _data_set(entry: DataSetEntry) -> Text:
    of_run = f" of run '{entry['run']}'" if entry["run"] else ""
    line = f"data '{entry['name']}'{of_run}: pass {entry['pass_number']}, {entry['done_count']} of "
    line += f"{entry['shard_count']} shards done, {entry['leased_count']} leased"
    return Text(line + f", {entry['reissued_count']} issued again" * bool(entry["reissued_count"]))


def _ago(age_s: float | None) -> str:
    return "" if age_s is None else f"{duration(age_s)} ago"


def _degraded(document: StatusDocument) -> str:
    count, replica_count = document["degraded_range_count"], document["replica_count"]
    in_sync = {int(n): ranges for n, ranges in document["ranges_by_in_sync"].items()}
    line = f"degraded: {count} ranges have fewer than {replica_count} replicas"
    waiting_count = sum(n for at, n in in_sync.items() if 0 < at < document["min_in_sync"])
    if waiting_count:
        line += f"; {waiting_count} take no pushes until {document['min_in_sync']} are in sync"
    if in_sync.get(0):
        line += f"; {in_sync[0]} have no living replica"
    return line


def _grid(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, no_wrap=True)
    return table


def _servers(
    servers: Sequence[ServerEntry], nodes: Sequence[NodeEntry], *, are_replicated: bool
) -> Table:
    states = {node["node_id"]: node["state"] for node in nodes}
    copies = ["backs up"] * are_replicated
    table = _grid(
        *("  node", "address", "state", "ranges", *copies),
        *("blocks", "parameters", "gate", "updates"),
    )
    for server in servers:
        first = ", ".join(server["ranges"][:3]) + ", ..." * (len(server["ranges"]) > 3)
        backed_up = str(server["backup_count"])
        if server["catching_up_count"]:
            backed_up += f" +{server['catching_up_count']} catching up"
        table.add_row(
            f"  {server['node_id']}",
            server["address"],
            states.get(server["node_id"], UNKNOWN),
            f"{server['range_count']} ({first})" if first else "0",
            *[backed_up] * are_replicated,
            _count(server["block_count"]),
            size(server["state_bytes"]),
            size(server["gate_bytes"]),
            _count(server["update_count"]),
        )
    return table


def _clients(nodes: Sequence[NodeEntry]) -> Table:
    table = _grid(
        "  node", "role", "rank", "state", "lane", "heard", "steps", "clocks", "loss", "staleness"
    )
    for node in nodes:
        if node["role"] == "server":
            continue
        planned = f" of {node['planned_step_count']}" if node["planned_step_count"] else ""
        clocks = ", ".join(f"{name} {clock}" for name, clock in sorted(node["clocks"].items()))
        table.add_row(
            f"  {node['node_id']}",
            node["role"],
            "" if node["rank"] is None else str(node["rank"]),
            node["state"],
            "" if node["lane"] is None else f"lane={node['lane']}",
            "" if node["last_heard_s"] is None else f"{node['last_heard_s']:.1f} s ago",
            f"{node['step_count']}{planned}",
            clocks,
            "" if node["loss"] is None else f"{node['loss']:.4f}",
            str(node["staleness"]),
        )
    return table


def _tables(tables: Sequence[TableEntry]) -> Table:
    grid = _grid("  name", "elements", "dtype", "blocks", "optimizer", "gate", "clock", "memory")
    for table in tables:
        lr = table["hyperparameters"].get("lr")
        clock = _count(table["clock"])
        if table["failure"] is not None:
            clock += " (failed)"
        elif table["is_initialized"] is False:
            clock += " (not initialized)"
        grid.add_row(
            f"  {table['name']}",
            f"{table['element_count']:,}",
            table["dtype"],
            str(table["block_count"]),
            table["optimizer"] + (f" lr {lr:g}" if lr is not None else ""),
            f"{table['consistency']} {table['reduction']}",
            clock,
            size(table["state_bytes"]),
        )
    return grid


def _waits(waits: Sequence[WaitEntry]) -> RenderableType:
    if not waits:
        return Text("  nobody waits")
    lines = []
    for wait in waits[:MAX_WAIT_COUNT]:
        table = f", table '{wait['table']}'" * bool(wait["table"])
        lines.append(f"  {wait['where']}{table}: {wait['waits_for']}")
    lines += [f"  and {len(waits) - MAX_WAIT_COUNT} more"] * (len(waits) > MAX_WAIT_COUNT)
    return Text("\n".join(lines))


def _count(value: int | None) -> str:
    return UNKNOWN if value is None else str(value)
