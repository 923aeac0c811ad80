"""A model that starts from an imported state dict: whether that is its own."""

from __future__ import annotations

from torch import nn

from ps_core.errors import InvalidCheckpoint
from ps_core.manifest import Imported
from ps_worker.spec.flat_layout import plain_name

_SHOWN_COUNT = 5


def check_known(imported: Imported, name: str, module: nn.Module) -> None:
    """Refuse what has tensors that the model does not have: it is another model's.

    Tied parameters count under each of their names, as `module.state_dict()` has them; those of
    the module that another optimizer trains count as well.

    Args:
        imported: what was imported.
        name: that of the model's `DistributedOptimizer`.
        module: the model.

    Raises:
        InvalidCheckpoint: naming some of them.
    """
    if not imported.is_for(f"{name}/"):
        return
    unknown = list(imported.unknown([plain_name(key) for key in module.state_dict()]))
    if unknown:
        shown = ", ".join(f"'{tensor}'" for tensor in unknown[:_SHOWN_COUNT])
        more = f" and {len(unknown) - _SHOWN_COUNT} others" * (len(unknown) > _SHOWN_COUNT)
        raise InvalidCheckpoint(
            f"{imported.url} has {shown}{more}, which model '{name}' does not have; expected the "
            "state dict of this model, or one that was imported with --prefix for another"
        )
