"""`pushpull checkpoint`: its commands and their options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ps_cli.console.output import Output
from ps_cli.console.reported import reported
from ps_cli.status.tables import SchedulerAddress

Url = Annotated[
    str,
    typer.Argument(
        help="A checkpoint's directory, or the root that has several, whose newest good one is "
        "meant. A path, or any URL of fsspec's, such as s3://bucket/runs/7."
    ),
]
Root = Annotated[
    str, typer.Argument(help="The root that has the checkpoints: a path, or a URL of fsspec's.")
]

checkpoint_app = typer.Typer(
    help="Checkpoints as files: which there are, whether they are whole, what is in them.",
    no_args_is_help=True,
)


@checkpoint_app.command()
def create(
    scheduler: SchedulerAddress = "",
    reason: Annotated[str, typer.Option(help="Why, for its manifest.")] = "asked for",
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that it may take.")] = 300.0,
) -> None:
    """Make a checkpoint of a cluster that runs, and print its directory.

    The tables are cut at one clock, at most a step ahead of the fastest worker; training goes on
    while it is written. The cluster's checkpoint URL says where it goes.
    """
    from ps_cli.train.run_checkpoints import create as create_checkpoint

    def make(output: Output) -> int:
        url, byte_count = create_checkpoint(scheduler, reason, timeout)
        output.say(f"{url} ({byte_count:,} bytes)")
        return 0

    reported(make)


@checkpoint_app.command(name="list")
def list_command(url: Root) -> None:
    """List the checkpoints under a root, newest last, and of bad ones why they are.

    Of an incremental one it says how many bytes are in which others. Manifests and headers are
    read; `verify` reads all.
    """
    # Here as below, so that the other commands start without numpy and fsspec.
    from ps_cli.checkpoint.commands import list_checkpoints

    reported(lambda output: list_checkpoints(url, output))


@checkpoint_app.command()
def show(
    url: Url,
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifest as it is.")] = False,
) -> None:
    """Show what a checkpoint has: tables, files and workers."""
    from ps_cli.checkpoint.commands import show_checkpoint

    reported(lambda output: show_checkpoint(url, output, as_json=as_json))


@checkpoint_app.command()
def verify(
    url: Annotated[str, typer.Argument(help="A checkpoint's directory, or a root: all under it.")],
) -> None:
    """Read every byte of a checkpoint and check it.

    Exit code: 0 when all is as its manifest says; 1 when not, with the file and the reason.
    """
    from ps_cli.checkpoint.commands import verify_checkpoints

    reported(lambda output: verify_checkpoints(url, output))


@checkpoint_app.command()
def prune(
    url: Root,
    keep: Annotated[int, typer.Option(min=1, help="How many good ones stay: the newest.")],
) -> None:
    """Remove all but the newest good checkpoints.

    What is older than the oldest that stays goes, good or not, save what one that stays refers to;
    what is newer stays: it may be about to be written.
    """
    from ps_cli.checkpoint.commands import prune_checkpoints

    reported(lambda output: prune_checkpoints(url, keep, output))


@checkpoint_app.command(name="compact")
def compact_command(url: Url) -> None:
    """Write a full checkpoint of the same content as an incremental one, beside it.

    It has the same number, counts as the newer of the two, and is verified before it counts at all.
    `prune` can then remove the others.
    """
    from ps_cli.checkpoint.commands import compact_checkpoint

    reported(lambda output: compact_checkpoint(url, output))


@checkpoint_app.command()
def diff(first: Url, second: Url) -> None:
    """Say in what two checkpoints differ: tables, specs, blocks, and by how much.

    Exit code: 0 when their tables are the same; 1 when not, or when one cannot be read.
    """
    from ps_cli.checkpoint.commands import diff_checkpoints

    reported(lambda output: diff_checkpoints(first, second, output))


@checkpoint_app.command()
def rescue(
    kept: Annotated[
        Path,
        typer.Argument(
            help="The file that a server wrote when another cluster's scheduler answered in the "
            "place of its own; its log line values_kept names it.",
            dir_okay=False,
        ),
    ],
    out: Annotated[Path, typer.Argument(help="The safetensors file to write.", dir_okay=False)],
) -> None:
    """Save the parameters of servers whose scheduler is gone.

    They are read from the servers, as each range is then; `import` makes a run's first checkpoint
    of the file. What optimizers keep is not in it.
    """
    from ps_cli.checkpoint.rescue import rescue as rescue_values

    reported(lambda output: rescue_values(kept, out, output))


@checkpoint_app.command()
def export(
    url: Url,
    out: Annotated[Path, typer.Argument(help="The safetensors file to write.", dir_okay=False)],
    prefix: Annotated[
        str, typer.Option(help="Only tables of this name, or below it: those of one model.")
    ] = "",
    optimizer: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            help="Write the optimizers' state to this safetensors file too, and what it means to "
            "a .json beside it.",
        ),
    ] = None,
) -> None:
    """Write a checkpoint's model as one safetensors file, for `load_state_dict`.

    Example: `pushpull checkpoint export runs/7 model.safetensors --prefix model`
    """
    from ps_cli.checkpoint.export import export as export_model

    reported(lambda output: export_model(url, out, prefix, optimizer, output))


@checkpoint_app.command(name="import")
def import_command(
    file: Annotated[
        Path,
        typer.Argument(
            help="A .safetensors file, or what torch.save makes of a state dict; nothing in it is "
            "unpickled.",
            exists=True,
            dir_okay=False,
            readable=True,
        ),
    ],
    url: Root,
    prefix: Annotated[
        str,
        typer.Option(help="Only for tables of this name, or below it: those of one model."),
    ] = "",
) -> None:
    """Make a checkpoint of a plain state dict, from which `pushpull train --resume URL` starts.

    Each tensor of the script's tables begins with the one of its name, at clock 0, on any number of
    servers; optimizers begin anew.

    Example: `pushpull checkpoint import model.safetensors runs/7`
    """
    from ps_cli.checkpoint.import_weights import import_model

    reported(lambda output: import_model(file, url, prefix, output))
