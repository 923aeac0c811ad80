"""`pushpull checkpoint`: its commands and their options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ps_cli.console.options import SchedulerAddress
from ps_cli.console.output import Output
from ps_cli.console.reported import guarded, refuse, reported
from ps_cli.console.scheduler_query import QUERY_DEADLINE_S

Url = Annotated[
    str,
    typer.Argument(
        help="A checkpoint's directory, or a root, whose newest good checkpoint is taken: a path, "
        "or any URL that fsspec knows, such as s3://bucket/runs/7."
    ),
]
Root = Annotated[
    str, typer.Argument(help="The root of the checkpoints: a path, or any URL that fsspec knows.")
]

checkpoint_app = typer.Typer(
    help="Make, inspect, check, compare and convert checkpoints.", no_args_is_help=True
)


@checkpoint_app.command()
def create(
    scheduler: SchedulerAddress = "",
    reason: Annotated[str, typer.Option(help="A note for the manifest.")] = "asked for",
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds that the checkpoint may take.")
    ] = 300.0,
) -> None:
    """Make a checkpoint of a running cluster under its --checkpoint-url, and print its directory.

    The checkpoint has the tables at one clock, at most a step ahead of the fastest worker. Training
    goes on while it is written.
    """
    from ps_cli.train.run_checkpoints import create as create_checkpoint

    async def make(output: Output) -> int:
        output.say(await create_checkpoint(scheduler, reason, timeout, QUERY_DEADLINE_S))
        return 0

    guarded(make)


@checkpoint_app.command(name="list")
def list_command(url: Root) -> None:
    """List the checkpoints under a root, newest last; each bad one has its reason.

    An incremental checkpoint is listed with the others that it needs, and its bytes in them. Only
    manifests and headers are read; `verify` reads all bytes.
    """
    # Imported here, and below, because other commands start without numpy and fsspec.
    from ps_cli.checkpoint.commands import list_checkpoints

    reported(lambda output: list_checkpoints(url, output))


@checkpoint_app.command()
def show(
    url: Url,
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifest as JSON.")] = False,
) -> None:
    """Show the tables, files and workers of a checkpoint."""
    from ps_cli.checkpoint.commands import show_checkpoint

    reported(lambda output: show_checkpoint(url, output, as_json=as_json))


@checkpoint_app.command()
def verify(
    url: Annotated[
        str, typer.Argument(help="A checkpoint's directory, or a root, for all under it.")
    ],
) -> None:
    """Read every byte of a checkpoint and check it.

    Exit code: 0 when all files agree with the manifest; 1 when one does not, with the reason.
    """
    from ps_cli.checkpoint.commands import verify_checkpoints

    reported(lambda output: verify_checkpoints(url, output))


@checkpoint_app.command()
def prune(
    url: Root,
    keep: Annotated[int, typer.Option(min=1, help="The number of good checkpoints to keep.")],
) -> None:
    """Remove all but the newest good checkpoints.

    Removes every checkpoint older than the newest good ones, good or bad, unless a kept one refers
    to it, or the kept ones lack a worker's state that it has. A newer one is kept even if it is
    bad, because it may still be being written.
    """
    from ps_cli.checkpoint.commands import prune_checkpoints

    reported(lambda output: prune_checkpoints(url, keep, output))


@checkpoint_app.command(name="compact")
def compact_command(url: Url) -> None:
    """Write a full checkpoint beside an incremental one, with the same content.

    It has the same number, is verified before it counts, and then counts as the newer of the two.
    `prune` can then remove the checkpoints that the incremental one needs.
    """
    from ps_cli.checkpoint.commands import compact_checkpoint

    reported(lambda output: compact_checkpoint(url, output))


@checkpoint_app.command()
def diff(first: Url, second: Url) -> None:
    """Print the differences of two checkpoints, in tables, specs and blocks.

    Exit code: 0 when their tables are the same; 1 when they differ, or one cannot be read.
    """
    from ps_cli.checkpoint.commands import diff_checkpoints

    reported(lambda output: diff_checkpoints(first, second, output))


@checkpoint_app.command()
def rescue(
    values_file: Annotated[
        Path,
        typer.Argument(
            help="The file that a server wrote when the scheduler of another cluster answered at "
            "its scheduler's address; the server's log has its path, at event=values_kept.",
            dir_okay=False,
        ),
    ],
    out: Annotated[Path, typer.Argument(help="The safetensors file to write.", dir_okay=False)],
) -> None:
    """Save the parameters of servers whose scheduler is gone.

    Each range is read as it is now, without optimizer state, and rows of embedding tables as
    `export` writes them. To train on from the file, make a checkpoint of it with `import`.
    """
    from ps_cli.checkpoint.rescue import rescue as rescue_values

    reported(lambda output: rescue_values(values_file, out, output))


@checkpoint_app.command()
def export(
    url: Url,
    out: Annotated[Path, typer.Argument(help="The safetensors file to write.", dir_okay=False)],
    prefix: Annotated[
        str, typer.Option(help="Only tables of one model: PREFIX itself, and PREFIX/...")
    ] = "",
    optimizer: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            help="Write the optimizers' state to this safetensors file too, and its description "
            "to a .json file beside it.",
        ),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            metavar="EARLIER",
            help="Write only the differences from the checkpoint in this directory, an earlier one "
            "of the same run: rows that are new or changed, ids of rows that are gone, and tensors "
            "that changed.",
        ),
    ] = None,
) -> None:
    """Write a checkpoint's model as one safetensors file, for `load_state_dict`.

    Example: `pushpull checkpoint export runs/7 model.safetensors --prefix model`
    """
    if since is not None and optimizer is not None:
        refuse(
            "--optimizer and --since: expected one of them; what has changed is for those who "
            "serve the model, and to train on takes a checkpoint"
        )
    if since is not None:
        from ps_cli.checkpoint.export_since import export_since

        reported(lambda output: export_since(url, since, out, prefix, output))
        return
    from ps_cli.checkpoint.export import export as export_model

    reported(lambda output: export_model(url, out, prefix, optimizer, output))


@checkpoint_app.command(name="import")
def import_command(
    file: Annotated[
        Path,
        typer.Argument(
            help="A safetensors file, or a state dict written by torch.save; nothing in it is "
            "unpickled.",
            exists=True,
            dir_okay=False,
            readable=True,
        ),
    ],
    url: Root,
    prefix: Annotated[
        str, typer.Option(help="Only for tables of one model: PREFIX itself, and PREFIX/...")
    ] = "",
) -> None:
    """Make a checkpoint of a plain state dict, from which `pushpull train --resume URL` starts.

    Each tensor of the script's tables takes its initial value from the tensor of the same name, at
    clock 0, on any number of servers. Optimizers start without state.

    Example: `pushpull checkpoint import model.safetensors runs/7`
    """
    from ps_cli.checkpoint.import_weights import import_model

    reported(lambda output: import_model(file, url, prefix, output))
