"""Modules in torch's DistributedDataParallel are found, whatever other threads do."""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel

from ps_worker.training.among_workers.process_group import data_parallel_modules
from tests.unit.tuple_threads import errors_beside


class Wrapped(DistributedDataParallel):
    """As a framework has it."""


class WrappedTwice(Wrapped):
    pass


def test_each_module_is_found_until_it_is_gone() -> None:
    before = data_parallel_modules()
    modules = [kind.__new__(kind) for kind in (DistributedDataParallel, Wrapped, WrappedTwice)]
    found = [each for each in data_parallel_modules() if all(each is not old for old in before)]
    assert {*map(id, found)} == {*map(id, modules)}
    del found, modules
    assert len(data_parallel_modules()) == len(before)


def test_other_threads_complete_their_tuples() -> None:
    assert errors_beside(data_parallel_modules) == []
