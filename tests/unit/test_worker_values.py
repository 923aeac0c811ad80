"""Arrays and tensors as bytes, table settings, and the ticket of an open step."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch

import ps_worker as ps
from ps_core.consistency import Mode
from ps_core.errors import InvalidConfig, InvalidTensor
from ps_core.tables.elements import DType, InitializerKind
from ps_core.tables.optimizers import OptimizerKind
from ps_core.tables.table_spec import Reduction
from ps_worker.spec.settings import table_spec
from ps_worker.spec.values import empty, is_tensor, raw_of, writable_raw_of
from ps_worker.steps.steps import PushTicket, StepResult
from ps_worker.transport.config import worker_config
from tests.unit.test_worker_cutting import table

TORCH = {
    DType.FLOAT32: torch.float32,
    DType.FLOAT16: torch.float16,
    DType.BFLOAT16: torch.bfloat16,
    DType.FLOAT64: torch.float64,
}


@pytest.mark.parametrize("dtype", list(DType))
def test_bytes_of_a_tensor_are_its_memory(dtype: DType) -> None:
    values = torch.arange(12, dtype=TORCH[dtype]).reshape(3, 4)
    raw = raw_of(values, dtype, "v")
    assert raw.nbytes == values.numel() * values.element_size()
    values[0, 0] = 5
    assert torch.equal(torch.from_numpy(raw).view(TORCH[dtype]).reshape(3, 4), values)


def test_bytes_follow_logical_order_whatever_the_memory_format() -> None:
    values = torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last)
    assert raw_of(values, DType.FLOAT32, "v").view(np.float32).tolist() == list(range(24))
    assert raw_of(np.arange(6.0).reshape(2, 3).T, DType.FLOAT64, "v").view(np.float64).tolist() == [
        0,
        3,
        1,
        4,
        2,
        5,
    ]


def test_plain_numbers_take_the_tables_dtype() -> None:
    assert raw_of([1, 2.5], DType.FLOAT16, "v").view(np.float16).tolist() == [1, 2.5]
    with pytest.raises(InvalidTensor, match=r"list; expected a torch\.bfloat16 tensor"):
        raw_of([1.0], DType.BFLOAT16, "v")


def test_parameters_are_tensors() -> None:
    assert is_tensor(torch.nn.Parameter(torch.zeros(1)))
    assert not is_tensor(np.zeros(1))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (torch.zeros(3, dtype=torch.float64), r"dtype torch\.float64; expected torch\.float32"),
        (torch.zeros(3).to_sparse(), "layout"),
        (np.zeros(3, np.float16), "dtype float16; expected float32"),
    ],
)
def test_another_dtype_is_refused(values: Any, message: str) -> None:
    with pytest.raises(InvalidTensor, match=message):
        raw_of(values, DType.FLOAT32, "v")


def test_memory_to_write_into_must_be_plain() -> None:
    assert np.shares_memory(
        writable_raw_of(out := np.zeros(3, np.float32), DType.FLOAT32, "out"), out
    )
    for bad in (np.zeros((3, 3), np.float32).T[:2], torch.zeros(3, 3).T, [0.0]):
        with pytest.raises(InvalidTensor):
            writable_raw_of(bad, DType.FLOAT32, "out")  # type: ignore[arg-type]
    frozen = np.zeros(3, np.float32)
    frozen.flags.writeable = False
    with pytest.raises(InvalidTensor, match="writable"):
        writable_raw_of(frozen, DType.FLOAT32, "out")


def test_a_new_array_is_numpys_where_numpy_has_the_dtype() -> None:
    assert isinstance(empty((2, 3), DType.FLOAT16), np.ndarray)
    assert empty((2,), DType.BFLOAT16).dtype == torch.bfloat16


def test_a_spec_says_what_the_script_said() -> None:
    spec = table_spec(
        "w",
        [("a", (2, 3)), ("b", ())],
        ps.SGD(lr=0.5),
        {
            "dtype": "float64",
            "consistency": ps.ASP(),
            "reduction": "sum",
            "init": ps.Inline(np.arange(7.0)),
            "block_elements": 64,
        },
    )
    assert [(t.name, t.shape, t.offset) for t in spec.tensors] == [("a", (2, 3), 0), ("b", (), 6)]
    assert (spec.mode, spec.reduction, spec.dtype) == (Mode.ASP, Reduction.SUM, DType.FLOAT64)
    assert spec.initializer.kind is InitializerKind.INLINE
    assert spec.initializer.inline == np.arange(7.0).tobytes()
    assert spec.optimizer.kind is OptimizerKind.SGD
    assert dict(spec.optimizer.hyperparameters)["lr"] == 0.5


@pytest.mark.parametrize(
    ("layout", "options", "message"),
    [
        (0, {}, "element_count is below 1"),
        ((-1,), {}, "dimension is -1"),
        ([("a", (1,)), "b"], {}, r"layout has 'b'; expected \(tensor name, shape\)"),
        ([("a", (1,)), ("a", (1,))], {}, "two tensors of one name"),
        (4, {"dtype": "int8"}, "dtype is 'int8'; expected one of 'float32'"),
        (4, {"consistency": 3}, r"consistency is 3; expected BSP\(\), SSP\(staleness\) or ASP\(\)"),
        (4, {"consistency": "ssp"}, "consistency is 'ssp'; expected one of bsp, "),
        (4, {"consistency": "ssp:-1"}, "staleness is -1; expected 0 to 1000000"),
        (4, {"init": 0}, "init is 0"),
        (4, {"init": ps.Inline(np.zeros(3, np.float32))}, "inline initializer has 12 bytes"),
        (4, {"block_elements": 65}, "block_elements is 65"),
        (4, {"colour": 1}, "no option colour"),
    ],
)
def test_a_wrong_setting_is_named(layout: Any, options: Any, message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        table_spec("w", layout, ps.SGD(), options)


def test_the_ticket_of_an_open_step_is_never_waited_for() -> None:
    future: Future[StepResult] = Future()
    ticket = PushTicket(table(4), 3, future, lambda: False)
    with pytest.raises(InvalidConfig, match="step 3 of table 't' has not been sealed"):
        ticket.check_sealed()
    assert not ticket.done()


def test_settings_come_from_arguments_then_the_environment() -> None:
    env = {"PUSHPULL_SCHEDULER": "a:1,b:2", "PUSHPULL_RANK": "3", "PUSHPULL_WINDOW_BYTES": "5"}
    config = worker_config({"rank": 1}, env)
    assert (config.scheduler, config.rank, config.window_bytes) == (("a:1", "b:2"), 1, 5)
    assert worker_config({"role": "reader"}, env).rank is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"role": "server"}, "role is 'server'; expected one of worker, reader, operator"),
        ({"role": "reader", "rank": 0}, "rank is 0 for role reader"),
        ({"rank": -1}, "rank is -1"),
        ({"request_deadline_s": 0.0}, "request_deadline_s is 0"),
        ({"window_bytes": 0}, "window_bytes is 0"),
        ({"outer_steps": -1}, "outer-steps is -1; expected a whole number, 0 or more"),
        ({"outer_steps": 1_000_001}, "outer_steps is 1000001; expected 0 to 1,000,000"),
    ],
)
def test_a_wrong_client_setting_is_named(arguments: Any, message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        worker_config({"scheduler": "s:1", **arguments}, {})


def test_the_public_names_are_there() -> None:
    assert sorted(ps.__all__) == sorted(set(ps.__all__))
    for name in ps.__all__:
        assert getattr(ps, name) is not None
    assert set(ps.__all__) <= set(dir(ps))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        ps.nothing  # noqa: B018 - the access is the test
