"""Tables as values: what a spec may say, what is filled in, and where its blocks lie."""

from __future__ import annotations

import inspect
import math
import re
from dataclasses import replace
from itertools import product

import pytest
import torch

from ps_core import limits
from ps_core.change import TableChange, TableCut
from ps_core.consistency import Consistency, Mode, StalePolicy, parsed
from ps_core.errors import InvalidConfig, InvalidKeys, InvalidTensor
from ps_core.keys import TableId
from ps_core.tables.elements import (
    Codec,
    DType,
    Initializer,
    InitializerKind,
    check_length,
    pack_presence,
    presence_bytes,
    unpack_presence,
)
from ps_core.tables.optimizers import (
    HYPERPARAMETER_DEFAULTS,
    MAX_LOADED_STEP_COUNT,
    ONLY_ROW_OPTIMIZERS,
    STEP_ARRAY,
    VALUES_ARRAY,
    Kernels,
    OptimizerKind,
    OptimizerSpec,
    array_words,
)
from ps_core.tables.table import Table, TensorSegment
from ps_core.tables.table_spec import Eviction, Reduction, RowsSpec, TableSpec, TensorSpec

SGD = OptimizerSpec(OptimizerKind.SGD)
SPEC = TableSpec("t", DType.FLOAT32, 10, SGD)


def spec_of(**fields: object) -> TableSpec:
    return replace(SPEC, **fields)  # type: ignore[arg-type]  # what a test changes


def optimizer(kind: OptimizerKind, **fields: object) -> OptimizerSpec:
    return replace(OptimizerSpec(kind), **fields)  # type: ignore[arg-type]


def rows_of(**fields: object) -> RowsSpec:
    return replace(RowsSpec(16), **fields)  # type: ignore[arg-type]  # what a test changes


def refuses(spec: TableSpec, words: str) -> None:
    with pytest.raises(InvalidConfig, match=re.escape(words)):
        spec.validated()


# --- what is meant where nothing is said


def test_a_spec_is_filled_in() -> None:
    found = SPEC.validated()
    assert found.block_elements == limits.DEFAULT_BLOCK_ELEMENTS
    assert found.tensors == (TensorSpec("t", (10,), 0),)
    assert dict(found.optimizer.hyperparameters) == HYPERPARAMETER_DEFAULTS[OptimizerKind.SGD]
    assert (found.mode, found.consistency) == (Mode.BSP, Consistency())
    assert (found.reduction, found.optimizer.kernels) == (Reduction.MEAN, Kernels.FAST)
    assert (found.initializer.kind, found.initializer.constant) == (InitializerKind.ZEROS, 0.0)
    assert (found.initializer.inline, found.initializer.scale) == (b"", 0.0)
    assert (found.allow_non_finite, found.gate_bytes) == (False, 0)
    settings = found.optimizer
    assert not any((settings.nesterov, settings.amsgrad, settings.centered, settings.maximize))
    assert found.validated() == found


def test_block_elements_of_0_are_the_default_and_others_stay() -> None:
    assert spec_of(block_elements=0).validated().block_elements == limits.DEFAULT_BLOCK_ELEMENTS
    assert spec_of(block_elements=128).validated().block_elements == 128


def test_a_bound_that_moves_begins_at_its_lowest() -> None:
    assert spec_of(consistency=parsed("ssp:2..8@5")).validated().consistency == parsed("ssp:2..8")


@pytest.mark.parametrize(("dtype", "size"), [*zip(DType, (4, 4, 4, 8), strict=True)])
def test_sums_are_wider_than_what_is_summed_where_that_is_narrow(dtype: DType, size: int) -> None:
    assert spec_of(dtype=dtype).accumulator_element_bytes == size
    assert spec_of(dtype=dtype).arithmetic_codec is (Codec.FP64 if size == 8 else Codec.FP32)


THEIRS = {
    OptimizerKind.SGD: torch.optim.SGD,
    OptimizerKind.ADAM: torch.optim.Adam,
    OptimizerKind.ADAMW: torch.optim.AdamW,
    OptimizerKind.ADAGRAD: torch.optim.Adagrad,
    OptimizerKind.RMSPROP: torch.optim.RMSprop,
}


@pytest.mark.parametrize("kind", THEIRS)
def test_the_defaults_are_those_of_torch(kind: OptimizerKind) -> None:
    parameters = inspect.signature(THEIRS[kind]).parameters.values()
    defaults = {each.name: each.default for each in parameters}
    defaults |= dict(zip(("beta1", "beta2"), defaults.get("betas", ()), strict=False))
    ours = HYPERPARAMETER_DEFAULTS[kind]
    assert ours == {name: defaults[name] for name in ours}


# --- names, sizes and layouts


def test_a_name_has_a_byte_at_least_and_so_many_at_most() -> None:
    most = limits.MAX_TABLE_NAME_BYTES
    for name in ("n", "n" * most, "ü" * (most // 2)):
        assert spec_of(name=name).validated().name == name
    refuses(spec_of(name=""), "table name has 0 bytes; expected 1 to")
    refuses(spec_of(name="n" * (most + 1)), f"table name has {most + 1} bytes")
    refuses(spec_of(name="ü" * (most // 2) + "n"), f"table name has {most + 1} bytes")


def test_a_table_has_an_element() -> None:
    assert spec_of(element_count=1).validated().tensors == (TensorSpec("t", (1,), 0),)
    refuses(spec_of(element_count=0), "element_count is below 1")


@pytest.mark.parametrize("size", [64, 128, limits.MAX_BLOCK_ELEMENTS])
def test_a_block_may_be_a_multiple_of_64(size: int) -> None:
    assert spec_of(block_elements=size).validated().block_elements == size


@pytest.mark.parametrize("size", [-64, 1, 63, 65, limits.MAX_BLOCK_ELEMENTS + 64])
def test_a_block_of_another_size_is_refused(size: int) -> None:
    refuses(spec_of(block_elements=size), f"block_elements is {size}; expected a multiple of 64")


def layout(*tensors: tuple[tuple[int, ...], int]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(f"t{n}", shape, offset) for n, (shape, offset) in enumerate(tensors))


def test_tensors_follow_each_other_without_gap() -> None:
    good = layout(((2, 2), 0), ((), 4), ((0, 3), 5), ((5,), 5))
    assert [tensor.element_count for tensor in good] == [4, 1, 0, 5]
    assert spec_of(tensors=good).validated().tensors == good
    refuses(spec_of(tensors=layout(((4,), 0), ((6,), 5))), "'t1' starts at 5; expected 4")
    refuses(spec_of(tensors=layout(((4,), 0), ((6,), 3))), "'t1' starts at 3; expected 4")
    refuses(spec_of(tensors=layout(((4,), 0))), "have 4 elements; element_count is 10")
    refuses(spec_of(tensors=layout(((11,), 0))), "have 11 elements; element_count is 10")


def test_a_tensor_may_have_as_many_dimensions_as_torch_allows() -> None:
    most = limits.MAX_TENSOR_DIMENSION_COUNT
    shape = (10,) + (1,) * (most - 1)
    assert spec_of(tensors=layout((shape, 0))).validated().tensors[0].element_count == 10
    refuses(spec_of(tensors=layout(((*shape, 1), 0))), f"'t0' has {most + 1} dimensions")


def test_a_layout_that_was_looked_at_is_not_looked_at_again() -> None:
    """A spec is checked wherever it comes by, and may have a hundred thousand tensors."""
    looks = []

    class Watched(TensorSpec):
        @property
        def element_count(self) -> int:
            looks.append(self.name)
            return super().element_count

    spec = spec_of(tensors=(Watched("a", (10,), 0),))
    for _ in range(2):
        spec.validated()
        assert looks == ["a"]


def test_a_table_may_have_so_many_tensors_and_no_more() -> None:
    """The number is looked at before the tensors are: here they are one and the same."""
    most = limits.MAX_TENSOR_COUNT
    refuses(spec_of(tensors=layout(((10,), 0)) * (most + 1)), f"has {most + 1} tensors; expected")
    refuses(spec_of(tensors=layout(((10,), 0)) * most), "'t0' starts at 0; expected 10")


# --- hyperparameters


def test_numbers_that_are_given_go_before_the_tables_own_and_those_before_the_defaults() -> None:
    own = optimizer(OptimizerKind.SGD, hyperparameters=(("lr", 0.5), ("momentum", 0.9)))
    expected = {"lr": 0.25, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.0}
    assert own.merged((("lr", 0.25),)) == tuple(sorted(expected.items()))
    assert dict(own.merged(()))["lr"] == 0.5


def test_a_number_that_the_optimizer_does_not_have_is_refused() -> None:
    expected = "sgd has no hyperparameter 'beta1'; it has clamp_max, clamp_min, dampening"
    with pytest.raises(InvalidConfig, match=expected):
        SGD.merged((("beta1", 0.5),))
    with pytest.raises(InvalidConfig, match="'lr'; it has none"):
        OptimizerSpec(OptimizerKind.ADD).merged((("lr", 0.5),))


def test_a_clamp_is_there_where_it_is_given() -> None:
    given = (("clamp_max", 0.5),)
    assert dict(SGD.merged(given))["clamp_max"] == 0.5
    assert "clamp_min" not in dict(SGD.merged(given))
    with pytest.raises(InvalidConfig, match=r"clamp_min is 1\.0; expected at most clamp_max, 0\.5"):
        SGD.merged((*given, ("clamp_min", 1.0)))
    point = dict(SGD.merged((*given, ("clamp_min", 0.5))))
    assert point["clamp_min"] == point["clamp_max"], "values that are held at one number"
    with pytest.raises(InvalidConfig, match="add has no hyperparameter 'clamp_max'; it has none"):
        OptimizerSpec(OptimizerKind.ADD).merged(given)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_is_finite(value: float) -> None:
    with pytest.raises(InvalidConfig, match="expected a finite number"):
        SGD.merged((("lr", value),))


@pytest.mark.parametrize("sign", [1, -1])
def test_a_rate_has_any_sign_up_to_a_magnitude(sign: int) -> None:
    most = sign * limits.MAX_HYPERPARAMETER_MAGNITUDE
    assert dict(SGD.merged((("lr", most),)))["lr"] == most
    with pytest.raises(InvalidConfig, match="expected a magnitude of at most"):
        SGD.merged((("lr", most * 1.001),))


def test_ftrl_has_no_rate_that_it_cannot_divide_by() -> None:
    ftrl = OptimizerSpec(OptimizerKind.FTRL)
    assert dict(ftrl.merged((("lr", 1e-18),)))["lr"] == 1e-18
    for wrong in (0.0, -0.1, 9e-19):
        with pytest.raises(InvalidConfig, match=f"'lr' is {wrong}; expected at least 1e-18"):
            ftrl.merged((("lr", wrong),))


def test_what_is_0_is_the_same_bits_whatever_its_sign() -> None:
    assert str(SGD.merged((("lr", -0.0),))) == str(SGD.merged((("lr", 0.0),)))


BOUNDED = [
    (OptimizerKind.ADAM, "beta1", True), (OptimizerKind.ADAM, "beta2", True),
    (OptimizerKind.SGD, "momentum", False), (OptimizerKind.RMSPROP, "alpha", False),
    (OptimizerKind.ADAM, "eps", False), (OptimizerKind.SGD, "weight_decay", False),
    (OptimizerKind.ADAGRAD, "lr_decay", False),
    (OptimizerKind.ADAGRAD, "initial_accumulator_value", False),
    (OptimizerKind.FTRL, "l1", False), (OptimizerKind.FTRL, "l2", False),
    (OptimizerKind.FTRL, "beta", False),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "name", "is_share"), BOUNDED)
def test_a_number_is_what_torch_accepts(kind: OptimizerKind, name: str, is_share: bool) -> None:
    """A share is below 1, everything is at least 0."""
    spec = OptimizerSpec(kind)
    assert dict(spec.merged(((name, 0.0),)))[name] == 0.0
    with pytest.raises(InvalidConfig, match=rf"'{name}' is -0\.001; expected at least 0"):
        spec.merged(((name, -0.001),))
    if is_share:
        with pytest.raises(InvalidConfig, match=r"at least 0\.0, below 1\.0"):
            spec.merged(((name, 1.0),))
    else:
        assert dict(spec.merged(((name, 1.5),)))[name] == 1.5


def test_a_custom_updates_numbers_are_its_own_and_have_no_bounds() -> None:
    custom = optimizer(
        OptimizerKind.CUSTOM, custom_update="lion", hyperparameters=(("beta1", 2.0), ("z", -1.0))
    )
    assert custom.merged((("z", -7.0),)) == (("beta1", 2.0), ("z", -7.0))
    assert (custom.label, SGD.label) == ("custom:lion", "sgd")
    with pytest.raises(InvalidConfig, match="custom:lion has no hyperparameter 'lr'"):
        custom.merged((("lr", 1.0),))
    crossed = (("clamp_max", 1.0), ("clamp_min", 2.0))
    assert replace(custom, hyperparameters=crossed).merged(()) == crossed, "names are its own, too"


# --- variants of optimizers

HAVE = {
    "nesterov": {OptimizerKind.SGD},
    "amsgrad": {OptimizerKind.ADAM, OptimizerKind.ADAMW},
    "centered": {OptimizerKind.RMSPROP},
    "maximize": set(OptimizerKind) - {OptimizerKind.CUSTOM},
}


@pytest.mark.parametrize(("flag", "kind"), [*product(HAVE, OptimizerKind)])
def test_a_variant_belongs_to_the_optimizers_that_have_it(flag: str, kind: OptimizerKind) -> None:
    fields: dict[str, object] = {flag: True}
    if kind is OptimizerKind.CUSTOM:
        fields["custom_update"] = "lion"
    if flag == "nesterov" and kind is OptimizerKind.SGD:
        fields["hyperparameters"] = (("momentum", 0.9),)
    rows = RowsSpec(16) if kind in ONLY_ROW_OPTIMIZERS else None
    spec = spec_of(optimizer=optimizer(kind, **fields), rows=rows)
    if kind in HAVE[flag]:
        assert getattr(spec.validated().optimizer, flag) is True
    else:
        words = "with custom_update" if flag == "maximize" else f"has no {flag}; expected it with"
        refuses(spec, f"table 't': {kind.value} {words}")


STATEFUL = (
    OptimizerSpec(OptimizerKind.SGD, (("momentum", 0.9),)),
    OptimizerSpec(OptimizerKind.ADAM),
    OptimizerSpec(OptimizerKind.ADAM, amsgrad=True),
    OptimizerSpec(OptimizerKind.ADAMW),
    OptimizerSpec(OptimizerKind.ADAGRAD),
    OptimizerSpec(OptimizerKind.RMSPROP, (("momentum", 0.9),)),
    OptimizerSpec(OptimizerKind.RMSPROP, (("momentum", 0.9),), centered=True),
)


@pytest.mark.parametrize("spec", STATEFUL, ids=str)
def test_state_has_the_names_that_it_has_in_torch(spec: OptimizerSpec) -> None:
    """Each is read and loaded by that name, with a count of steps and the values beside it."""
    parameter = torch.nn.Parameter(torch.ones(1))
    flags = {flag: True for flag in ("amsgrad", "centered") if getattr(spec, flag)}
    theirs = THEIRS[spec.kind]([parameter], **dict(spec.hyperparameters), **flags)
    parameter.grad = torch.ones(1)
    theirs.step()
    names = set(theirs.state[parameter]) - {STEP_ARRAY}
    assert set(spec.state_arrays) == names
    assert array_words(spec) == ", ".join((*spec.state_arrays, "step"))
    assert all(spec.has_array(name) for name in (*names, "step", "values"))
    assert not spec.has_array("stepx")
    assert (STEP_ARRAY, VALUES_ARRAY) == ("step", "values")


def test_a_sum_of_workers_has_no_state() -> None:
    add = OptimizerSpec(OptimizerKind.ADD)
    assert not any(map(add.has_array, ("step", "values", "momentum_buffer")))
    assert array_words(add) == "none: add has no state in torch.optim's layout"


def test_steps_are_counted_as_far_as_torch_counts_them() -> None:
    """It counts in float32, where one more is the same number from there on."""
    most = torch.tensor(float(MAX_LOADED_STEP_COUNT))
    assert most + 1 == most
    assert most - 1 != most
    assert most / 2 + 1 != most / 2


def test_an_update_has_a_name_where_it_is_custom_and_only_there() -> None:
    named = spec_of(optimizer=optimizer(OptimizerKind.CUSTOM, custom_update="lion"))
    assert named.validated().optimizer.custom_update == "lion"
    refuses(spec_of(optimizer=optimizer(OptimizerKind.CUSTOM)), "expected a name with custom")
    refuses(spec_of(optimizer=replace(SGD, custom_update="lion")), "expected a name with custom")


def test_an_updates_name_has_so_many_bytes_at_most() -> None:
    most = limits.MAX_CUSTOM_UPDATE_NAME_BYTES
    longest = spec_of(optimizer=optimizer(OptimizerKind.CUSTOM, custom_update="n" * most))
    assert longest.validated().optimizer.custom_update == "n" * most
    long = optimizer(OptimizerKind.CUSTOM, custom_update="n" * (most + 1))
    refuses(spec_of(optimizer=long), f"custom_update has {most + 1} bytes; expected at most {most}")


@pytest.mark.parametrize(("momentum", "dampening"), [(0.0, 0.0), (0.9, 0.1), (0.0, 0.1)])
def test_nesterov_needs_momentum_and_no_dampening(momentum: float, dampening: float) -> None:
    numbers = (("dampening", dampening), ("momentum", momentum))
    asked = replace(SGD, nesterov=True, hyperparameters=numbers)
    refuses(spec_of(optimizer=asked), "nesterov needs momentum above 0 and no dampening")
    spec_of(optimizer=replace(asked, nesterov=False)).validated()


def test_inner_steps_are_sgds_and_so_many_at_most() -> None:
    most = limits.MAX_INNER_STEP_COUNT
    spec = spec_of(optimizer=replace(SGD, inner_steps=most))
    assert spec.validated().optimizer.inner_steps == most
    more = replace(SGD, inner_steps=most + 1)
    refuses(spec_of(optimizer=more), "sgd with inner_steps 1000001; expected 0 to 1,000,000 with")
    adam = optimizer(OptimizerKind.ADAM, inner_steps=2)
    refuses(spec_of(optimizer=adam), "adam with inner_steps 2; expected 0 to 1,000,000 with sgd, 0")


# --- optimizers and consistency


@pytest.mark.parametrize(
    ("kind", "fits", "refused"),
    [
        (OptimizerKind.AGGREGATE, ("bsp",), ("bsp:backup=1", "ssp:1", "asp")),
        (OptimizerKind.ASSIGN, ("bsp", "ssp:1", "asp"), ("asp:divide", "asp:reject=1")),
        (OptimizerKind.ADD, ("asp", "asp:divide", "asp:damp=1"), ("asp:compensate=1",)),
        (OptimizerKind.SGD, ("asp:compensate=1", "bsp:backup=1"), ()),
    ],
)
def test_what_an_optimizer_takes(
    kind: OptimizerKind, fits: tuple[str, ...], refused: tuple[str, ...]
) -> None:
    for text in fits:
        spec = spec_of(optimizer=OptimizerSpec(kind), consistency=parsed(text))
        assert spec.validated().consistency == parsed(text)
    for text in refused:
        refuses(spec_of(optimizer=OptimizerSpec(kind), consistency=parsed(text)), "table 't': A")


def test_a_push_of_inner_steps_is_not_compensated() -> None:
    outer = replace(SGD, inner_steps=2)
    spec_of(optimizer=outer, consistency=parsed("asp:divide")).validated()
    compensated = spec_of(optimizer=outer, consistency=parsed("asp:compensate=1"))
    refuses(compensated, "table 't': inner_steps is 2, so pushes are no gradients; expected no")


def test_fragments_have_no_backup_workers() -> None:
    """Whoever was left out would learn by pulls of the whole table how far the others are."""
    late = parsed("bsp:backup=1")
    spec_of(optimizer=replace(SGD, inner_steps=2), consistency=late).validated()
    parts = spec_of(optimizer=replace(SGD, inner_steps=2, fragment_count=2), consistency=late)
    refuses(parts, "table 't': fragment_count is 2 with bsp:backup=1; expected no backup workers")


def test_a_table_says_which_of_its_settings_is_wrong() -> None:
    wrong = Consistency(Mode.ASP, policy=StalePolicy.DAMP)
    refuses(spec_of(consistency=wrong), "table 't': alpha is 0.0; expected above 0")


# --- initial values


@pytest.mark.parametrize("dtype", DType)
def test_inline_values_are_as_long_as_the_table(dtype: DType) -> None:
    size = 10 * {DType.FLOAT64: 8, DType.FLOAT32: 4}.get(dtype, 2)
    spec = spec_of(dtype=dtype, initializer=Initializer(InitializerKind.INLINE, inline=bytes(size)))
    assert spec.validated().initializer.inline == bytes(size)
    for other in (size - 1, size + 1, 0):
        inline = Initializer(InitializerKind.INLINE, inline=bytes(other))
        refuses(replace(spec, initializer=inline), f"has {other} bytes; expected {size}, at most")


def test_inline_values_have_so_many_bytes_at_most() -> None:
    most = limits.MAX_INLINE_INITIALIZER_BYTES
    for size in (most, most + 4):
        inline = Initializer(InitializerKind.INLINE, inline=bytes(size))
        spec = spec_of(element_count=size // 4, initializer=inline)
        if size == most:
            assert len(spec.validated().initializer.inline) == most
        else:
            refuses(spec, f"has {size} bytes; expected {size}, at most {most}")


def constant(value: float, **fields: object) -> TableSpec:
    return spec_of(initializer=Initializer(InitializerKind.CONSTANT, constant=value), **fields)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_constant_is_one_that_the_table_can_hold(sign: int) -> None:
    largest = sign * limits.MAX_FLOAT32
    assert constant(largest).validated().initializer.constant == largest
    refuses(constant(largest * 1.001), "expected a finite number that float32 tables can hold")
    constant(largest * 1.001, dtype=DType.FLOAT64).validated()


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_constant_is_finite_unless_the_table_allows_others(value: float) -> None:
    refuses(constant(value), "expected a finite number")
    constant(value, allow_non_finite=True).validated()


# --- blocks


def table(element_count: int, *tensors: tuple[tuple[int, ...], int], first: int = 0) -> Table:
    spec = spec_of(element_count=element_count, block_elements=64, tensors=layout(*tensors))
    return Table(TableId(1), first, spec.validated())


def test_the_last_block_is_what_remains() -> None:
    for count, lengths in ((1, [1]), (64, [64]), (65, [64, 1]), (130, [64, 64, 2])):
        found = table(count)
        assert [found.block_length(block) for block in range(found.block_count)] == lengths


def test_there_is_no_other_block() -> None:
    found = table(130)
    for block in (-1, 3):
        with pytest.raises(InvalidKeys, match=f"has blocks 0 to 2; got {block}"):
            found.block_length(block)


def test_a_block_of_rows_is_a_partition_and_is_laid_out_as_one_row() -> None:
    found = Table(TableId(1), 0, spec_of(rows=RowsSpec(partition_count=3)).validated())
    assert found.block_count == 3
    for block in range(3):
        assert found.block_length(block) == 10
        assert found.segments(block) == (TensorSegment(0, 0, 10),)
    with pytest.raises(InvalidKeys, match="has blocks 0 to 2; got 3"):
        found.block_length(3)


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("partition_count", 0, limits.MAX_PARTITION_COUNT),
        ("seed", 0, 2**64 - 1),
        ("max_row_count", 0, 2**63 - 1),
        ("evict_after", 0, limits.MAX_ROW_AGE_COUNT),
        ("admit_after", 1, limits.MAX_ROW_AGE_COUNT),
    ],
)
def test_numbers_of_rows_have_bounds(name: str, low: int, high: int) -> None:
    for value in (low, high):
        found = spec_of(rows=rows_of(**{name: value})).validated()
        assert getattr(found.rows, name) == value
    for value in (low - 1, high + 1):
        with pytest.raises(InvalidConfig, match=str(value)):
            spec_of(rows=rows_of(**{name: value})).validated()


def test_rows_are_evicted_by_use_where_a_number_of_them_is_given() -> None:
    by_use = replace(RowsSpec(16), eviction=Eviction.LFU)
    with pytest.raises(InvalidConfig, match="without max_rows"):
        spec_of(rows=by_use).validated()
    assert spec_of(rows=replace(by_use, max_row_count=1)).validated().rows is not None


def test_weight_decay_in_a_step_is_refused_by_tables_of_rows_alone() -> None:
    decay = (("weight_decay", 0.1),)
    assert dict(table(10).step_hyperparameters.merged(decay))["weight_decay"] == 0.1
    of_rows = Table(TableId(1), 0, spec_of(rows=RowsSpec(16)).validated())
    with pytest.raises(InvalidConfig, match="'weight_decay' of sgd is"):
        of_rows.step_hyperparameters.merged(decay)


def test_segments_are_where_tensors_and_blocks_overlap() -> None:
    """A tensor that ends with a block is not in the next, and one without elements is in none."""
    found = table(140, ((64,), 0), ((0,), 64), ((70,), 64), ((), 134), ((5,), 135))
    assert found.segments(0) == (TensorSegment(0, 0, 64),)
    assert found.segments(1) == (TensorSegment(2, 0, 64),)
    assert found.segments(2) == (
        TensorSegment(2, 0, 6),
        TensorSegment(3, 6, 7),
        TensorSegment(4, 7, 12),
    )


def test_ranges_come_in_order_with_their_blocks_in_order() -> None:
    found = table(64 * 600, first=5).blocks_by_range(7)
    assert list(found) == sorted(found)
    assert all(list(blocks) == sorted(blocks) for blocks in found.values())
    assert sorted(block for blocks in found.values() for block in blocks) == list(range(600))


def test_ranges_are_worked_out_once_and_the_first_decides() -> None:
    found = table(64 * 9, first=5)
    assert not found.knows_ranges(7)
    assert found.deciding_range(7) == min(found.range_of_block(block, 7) for block in range(9))
    assert found.knows_ranges(7)
    assert not found.knows_ranges(8)
    assert found.blocks_by_range(7) is found.blocks_by_range(7)


def test_a_table_of_a_run_is_called_by_both_names() -> None:
    unnamed, of_run = table(64), replace(table(64), run="a")
    assert (unnamed.run, unnamed.key, unnamed.title) == ("", ("", "t"), "t")
    assert (of_run.key, of_run.title) == (("a", "t"), "a:t")


@pytest.mark.parametrize(
    ("setting", "change", "step"),
    [
        ("bsp", None, 5), ("ssp:1", None, 5), ("asp", None, None),
        ("bsp", ("asp", 4), None), ("asp", ("bsp", 4), 5),
        ("bsp", ("asp", 5), 5), ("bsp", ("asp", 6), 5), ("bsp", ("ssp:1", 5), 5),
    ],
)  # fmt: skip
def test_a_cut_is_after_a_step_unless_workers_run_free(
    setting: str, change: tuple[str, int] | None, step: int | None
) -> None:
    """Where they do, each range is cut at a moment of its own. A change that comes after the cut,
    or at the same clock, holds all ranges there.
    """
    found = replace(table(64), cut=TableCut(1, 5))
    found = replace(found, spec=replace(found.spec, consistency=parsed(setting)))
    if change is not None:
        found = replace(found, change=TableChange(1, change[1], parsed(change[0])))
    assert found.cut_step == step
    assert replace(found, cut=None).cut_step is None


def test_the_newest_setting_holds() -> None:
    before = table(64)
    after = replace(before, change=TableChange(1, 4, parsed("asp")))
    assert (before.consistency, after.consistency) == (Consistency(), parsed("asp"))
    assert after.step_hyperparameters.merged((("lr", 0.5),)) == SGD.merged((("lr", 0.5),))


# --- presence


def test_presence_takes_a_bit_for_each_segment() -> None:
    assert [presence_bytes(count) for count in (0, 1, 8, 9, 16, 17)] == [0, 1, 1, 2, 2, 3]


def test_presence_of_another_length_is_refused() -> None:
    for bitmap, count in ((b"\0", 9), (b"\0\0", 8)):
        with pytest.raises(InvalidKeys, match=f"presence has {len(bitmap)} bytes; expected"):
            unpack_presence(bitmap, count)


def test_the_lowest_bit_is_the_first_segment() -> None:
    assert pack_presence((True,) + (False,) * 8) == b"\x01\x00"
    assert unpack_presence(b"\x01\x00", 9) == (True,) + (False,) * 8
    assert unpack_presence(b"", 3) == (True, True, True)


def test_a_payload_of_int8_has_a_scale_for_each_256_elements_begun() -> None:
    sizes = {count: Codec.INT8.payload_bytes(count) for count in (1, 255, 256, 257, 512, 513)}
    assert sizes == {1: 5, 255: 259, 256: 260, 257: 265, 512: 520, 513: 525}
    assert [codec.payload_bytes(257) for codec in (Codec.FP32, Codec.BF16, Codec.FP64)] == [
        1028, 514, 2056,
    ]  # fmt: skip


def test_a_payload_of_signs_has_a_bit_an_element_too() -> None:
    sizes = {count: Codec.SIGN.payload_bytes(count) for count in (1, 8, 9, 256, 257)}
    assert sizes == {1: 5, 8: 5, 9: 6, 256: 36, 257: 41}


@pytest.mark.parametrize(("codec", "bits"), [*zip(Codec, (32, 16, 16, 64, 8, 1), strict=False)])
def test_elements_have_the_width_of_their_codec(codec: Codec, bits: int) -> None:
    assert codec.element_bits == bits
    assert codec.is_raw is (bits not in {8, 1})
    assert not codec.is_raw or codec.element_bytes == bits // 8


def test_a_sparse_payload_has_eight_bytes_for_each_element_that_is_sent() -> None:
    check_length(8, Codec.SPARSE, 1)
    check_length(8, Codec.SPARSE, 3)
    check_length(24, Codec.SPARSE, 3)
    for wrong in (0, 7, 12, 32):
        with pytest.raises(
            InvalidTensor, match=f"{wrong} bytes; expected a multiple of 8, from 8 to 24"
        ):
            check_length(wrong, Codec.SPARSE, 3)
    assert not Codec.SPARSE.is_raw


def test_a_low_rank_payload_has_whole_numbers_of_four_bytes_and_no_more_than_float32() -> None:
    for right in (20, 24, 36):
        check_length(right, Codec.LOW_RANK, 9)
    for wrong in (0, 12, 16, 21, 40):
        words = f"{wrong} bytes; expected a multiple of 4, from 20 to 36"
        with pytest.raises(InvalidTensor, match=words):
            check_length(wrong, Codec.LOW_RANK, 9)
    with pytest.raises(InvalidTensor):
        check_length(8, Codec.LOW_RANK, 2)  # shorter than any, though as long as float32
    assert not Codec.LOW_RANK.is_raw


def test_what_leaves_a_part_to_later_pushes_is_no_codec_of_values() -> None:
    of_pushes = {codec for codec in Codec if codec.is_for_pushes_alone}
    assert of_pushes == {Codec.SIGN, Codec.SPARSE, Codec.LOW_RANK}
