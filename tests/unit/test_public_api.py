"""`import pushpull as ps`: which names there are, and what they show of themselves."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

import ps_worker
import pushpull as ps
from docs.api import BELOW
from ps_core import errors as core_errors
from ps_core.errors import PushpullError
from ps_worker.client.connect import ConnectOptions
from ps_worker.client.shown_options import OF_THE_CLIENT
from ps_worker.spec.settings import TABLE_DEFAULTS, TableOptions
from ps_worker.spec.training_options import OptimizerOptions, TrainingOptions
from ps_worker.transport.config import WorkerConfig
from pushpull import errors, jagged, types

NAMES = {
    *("connect", "Client", "local_cluster", "ray_cluster"),
    *("DistributedOptimizer", "DistributedSampler", "pull_model", "RandomState"),
    *("Embedding", "EmbeddingBag", "RowwiseAdagrad", "FTRL", "Uniform", "Normal"),
    *("EmbeddingBagCollection", "HybridOptimizer", "prefetch"),
    *("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Aggregate", "Add"),
    *("Outer", "Custom", "Assign"),
    *("BSP", "SSP", "ASP"),
    *("Zeros", "Constant", "Inline", "FromRank0"),
    "empty_shared",
}

MOST_NAMES = 35


def test_the_public_names_are_these_and_few() -> None:
    assert set(ps.__all__) == NAMES
    assert len(ps.__all__) == len(NAMES) <= MOST_NAMES
    assert set(dir(ps)) == NAMES | {"errors", "jagged", "types", "__version__"}


def test_each_name_is_the_workers_and_has_a_docstring() -> None:
    for name in ps.__all__:
        assert getattr(ps, name) is getattr(ps_worker, name)
        assert inspect.getdoc(getattr(ps, name))
    for module in (jagged, types):
        for name in module.__all__:
            assert inspect.isclass(getattr(module, name))
            assert inspect.getdoc(getattr(module, name))


def test_each_member_of_a_public_class_has_a_docstring() -> None:
    without = []
    for cls in (getattr(ps, name) for name in ps.__all__):
        if not isinstance(cls, type):
            continue
        for base in cls.__mro__:
            if not base.__module__.startswith(("ps_", "pushpull")):
                continue
            for name, member in vars(base).items():
                text = member.fget.__doc__ if isinstance(member, property) else member.__doc__
                is_field = not (callable(member) or isinstance(member, property))
                if not (name.startswith("_") or name in BELOW or is_field or text):
                    without.append(f"{base.__qualname__}.{name}")
    assert not without


def test_what_the_worker_exports_is_public_somewhere() -> None:
    assert set(ps_worker.__all__) <= NAMES | set(types.__all__) | set(errors.__all__)


def test_every_error_is_in_errors() -> None:
    raised = {
        name
        for name, kind in vars(core_errors).items()
        if isinstance(kind, type) and issubclass(kind, PushpullError)
    }
    assert set(errors.__all__) == raised
    assert issubclass(ps.errors.WaitExpired, ps.errors.PushpullError)


def test_a_name_that_is_elsewhere_is_told_where() -> None:
    with pytest.raises(AttributeError, match=r"it is pushpull\.errors\.WaitExpired"):
        ps.WaitExpired  # type: ignore[attr-defined] # noqa: B018
    with pytest.raises(AttributeError, match=r"it is pushpull\.jagged\.KeyedJaggedTensor"):
        ps.KeyedJaggedTensor  # type: ignore[attr-defined] # noqa: B018
    with pytest.raises(AttributeError, match=r"no attribute 'Nonsense'$"):
        ps.Nonsense  # type: ignore[attr-defined] # noqa: B018


OPTIONS: list[tuple[Callable[..., Any], Any, str, dict[str, object]]] = [
    (
        ps.connect, ConnectOptions, str(ps.connect.__doc__),
        {name: WorkerConfig.__dataclass_fields__[name].default
         for name in ConnectOptions.__annotations__},
    ),
    (ps.Client.create_table, TableOptions, str(ps.Client.create_table.__doc__), TABLE_DEFAULTS),
    (
        ps.DistributedOptimizer, OptimizerOptions, str(ps.DistributedOptimizer.__doc__),
        {name: field.default for name, field in TrainingOptions.__dataclass_fields__.items()
         if name not in OF_THE_CLIENT},
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("function", "options", "docstring", "defaults"),
    OPTIONS,
    ids=["connect", "create_table", "DistributedOptimizer"],
)
def test_help_has_every_option_with_its_type_its_default_and_its_meaning(
    function: Callable[..., Any], options: Any, docstring: str, defaults: dict[str, object]
) -> None:
    shown = {
        name: parameter
        for name, parameter in inspect.signature(function).parameters.items()
        if name in options.__annotations__
    }
    assert list(shown) == list(options.__annotations__)
    section = re.split(r"\n\n", re.split(r"Options.*:\n", inspect.cleandoc(docstring))[1])[0]
    documented = re.findall(r"^    (\w+) \((.+), (.+?)\): \S", section, re.MULTILINE)
    assert [name for name, _, _ in documented] == list(options.__annotations__)
    for name, kind, default in documented:
        assert kind == options.__annotations__[name].__forward_arg__ == str(shown[name].annotation)
        assert default == repr(shown[name].default)
        if function is ps.connect or name not in OF_THE_CLIENT:
            assert shown[name].default == defaults[name]


def test_an_option_that_there_is_not_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(errors.InvalidConfig, match=r"has no option lanes; it has .*lane"):
        ps.connect("nowhere:1", lanes="shm")  # type: ignore[call-arg]
