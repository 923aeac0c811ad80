"""What a worker's own state may have; what is refused, and why."""

from __future__ import annotations

import enum
import functools
import json
from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from ps_core.errors import InvalidCheckpoint, InvalidConfig
from ps_core.limits import MAX_STATE_DEPTH
from ps_worker.checkpoint.state_codec import decode, encode

WEIGHT = nn.Parameter(torch.ones(2))


class Colour(enum.IntEnum):
    RED = 1


class Point(NamedTuple):
    x: int


def returned(state: dict[Any, Any]) -> dict[Any, Any]:
    value, tensors = encode(state)
    return decode(json.loads(json.dumps(value)), tensors)


def test_simple_states_read_as_themselves() -> None:
    state = {"lr": {"base_lrs": [0.1, 1], "last": None, "on": True, "name": "step"}}
    assert encode(state) == (state, {})


def test_a_tensor_is_named_for_its_path() -> None:
    value, tensors = encode({"optimizer": {"state": {0: {"step": torch.tensor(3.0)}}}})
    name = "optimizer.state[0].step"
    assert value == {"optimizer": {"state": {"$dict": [[0, {"step": {"$tensor": name}}]]}}}
    assert list(tensors) == [name]


def test_tensors_of_equal_paths_and_reserved_names_have_names_of_their_own() -> None:
    one, two, three, four = (torch.tensor(number) for number in range(4))
    state = {"a": {0: one, "b": two}, "__metadata__": three, "a[0]#1": four}
    state["a"] = {0: one, "b": [two], "b[0]": two}
    value, tensors = encode({**state, "same": {0: one}, "list": [[one], {0: two}]})
    assert "__metadata__" not in tensors
    assert len(tensors) == 8
    assert decode(value, tensors)["__metadata__"] == three


def test_long_keys_of_tensors_do_not_collide() -> None:
    state = {"k" * 300 + str(number): torch.tensor(number) for number in range(3)}
    assert returned(state) == state


def test_integers_of_any_size_come_back() -> None:
    numbers = [10**5000, -(10**5000), 2**53, 1 - 2**53, 0]
    state: dict[Any, Any] = {"seeds": numbers, **dict.fromkeys(numbers, "as a key")}
    assert returned(state) == state


def test_a_path_with_a_huge_key_can_be_said() -> None:
    state: dict[Any, Any] = {10**5000: object()}
    with pytest.raises(InvalidConfig, match=r"^\[an integer of 16610 bits\] is a object;"):
        encode(state)


def test_a_reference_that_is_huge_can_be_said() -> None:
    with pytest.raises(InvalidCheckpoint, match="a is an integer of 16610 bits; expected a hexa"):
        decode({"a": {"$int": 10**5000}}, {})


def test_what_looks_like_a_reference_is_not_one() -> None:
    state = {"a": {"$tensor": "b"}, "b": "$tensor", "$dict": [], "c": {"$int": "0x1", "d": 1}}
    assert returned(state) == state


def test_texts_that_are_no_unicode_come_back_apart() -> None:
    state = {"\ud83d\ude00": "\udcff", "pair": "\ud83d\ude00", "letter": "\U0001f600"}
    back = returned(state)
    assert back == state
    assert [len(back["pair"]), len(back["letter"])] == [2, 1]


def test_views_and_tied_tensors_come_back_apart_and_contiguous() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    state = {"turned": base.T, "row": base[1], "spread": torch.ones(1).expand(5), "tied": base}
    back = returned(state)
    for name, tensor in state.items():
        assert torch.equal(back[name], tensor)
        assert back[name].is_contiguous()
    assert len({tensor.untyped_storage().data_ptr() for tensor in back.values()}) == 4


def test_tensors_and_arrays_are_copied_when_they_are_encoded() -> None:
    tensor, array = torch.zeros(3), np.zeros(3)
    value, tensors = encode({"tensor": tensor, "array": array})
    tensor += 1
    array += 1
    back = decode(value, tensors)
    assert back["tensor"].tolist() == back["array"].tolist() == [0.0] * 3


def test_a_parameter_becomes_the_tensor_that_it_holds() -> None:
    back = returned({"weight": WEIGHT, "grown": WEIGHT * 2})
    assert [(type(one), one.requires_grad) for one in back.values()] == [(torch.Tensor, False)] * 2


def test_what_torch_computes_lazily_is_saved_as_it_reads() -> None:
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    state = {"conjugate": numbers.conj(), "negative": numbers.conj().imag}
    back = returned(state)
    assert all(torch.equal(back[name], tensor) for name, tensor in state.items())


def test_arrays_come_back_writable_and_of_their_dtype() -> None:
    array = np.arange(6, dtype=">i2").reshape(2, 3).T
    back = returned({"array": array})["array"]
    assert (back.dtype, back.tolist()) == (array.dtype, array.tolist())
    back[0, 0] = 7


def test_a_modules_state_keeps_its_metadata() -> None:
    state = nn.Sequential(nn.BatchNorm1d(2)).state_dict()
    back = returned({"model": state})["model"]
    assert type(back) is OrderedDict
    assert list(back) == list(state)
    assert vars(back) == vars(state)
    assert type(vars(back)["_metadata"]) is OrderedDict


def ordered_with_attribute() -> OrderedDict[str, int]:
    state: OrderedDict[str, int] = OrderedDict()
    vars(state)["factory"] = print
    return state


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (lambda: 0, r"lr\.lambdas\[0\] is a function; a state may have None, bool, int"),
        (functools.partial(print), r"lr\.lambdas\[0\] is a functools\.partial;"),
        (defaultdict(list), r"lr\.lambdas\[0\] is a collections?\.?defaultdict;|is a defaultdict;"),
        (Colour.RED, r"is a .*Colour;"),
        (Point(1), r"is a .*Point;"),
        (bytearray(b"a"), "is a bytearray;"),
        (1j, "is a complex;"),
        (range(3), "is a range;"),
        (torch.device("cpu"), r"is a torch\.device;"),
        (np.array(["a"]), "numpy's dtype <U1; expected one of booleans, numbers or times"),
        (np.array([None]), "numpy's dtype object;"),
        (np.str_("a"), "numpy's dtype <U1;"),
        (np.ma.masked_array([1]), r"is a numpy\.ma\..*MaskedArray;"),
        (torch.zeros(2, 2).to_sparse(), r"a tensor of torch\.float32, torch\.sparse_coo, on cpu"),
        (torch.zeros(2, dtype=torch.complex128), r"torch\.complex128, .* expected a dense one"),
        (torch.zeros(2, device="meta"), "on meta; expected a dense one, with values"),
        ({(1, 2): 3}, r"\[0\]\[\(1, 2\)\]: a tuple as key or element; expected one of NoneType"),
        ({frozenset({1})}, "a frozenset as key or element"),
        ({np.int64(3): 1}, r"a numpy\.int64 as key"),
        (ordered_with_attribute(), "an OrderedDict with attributes of its own: factory"),
    ],
)
def test_what_cannot_be_saved_is_refused_by_its_path(value: object, words: str) -> None:
    with pytest.raises(InvalidConfig, match=words) as raised:
        encode({"lr": {"lambdas": [value]}})
    assert raised.value.message.startswith("lr.lambdas[0]")


def test_a_state_that_is_no_dict_is_refused() -> None:
    wrong: Any = [1]
    with pytest.raises(InvalidConfig, match="the state is a list; expected a dict"):
        encode(wrong)


def test_a_state_that_contains_itself_is_refused() -> None:
    state: dict[str, Any] = {}
    state["inner"] = [state, state]
    with pytest.raises(InvalidConfig, match=f"nested deeper than {MAX_STATE_DEPTH}"):
        encode(state)


def test_the_deepest_state_comes_back_and_a_deeper_one_is_refused() -> None:
    state: Any = {}
    for _ in range(MAX_STATE_DEPTH):
        state = {0: state}
    assert returned(state) == state
    with pytest.raises(InvalidConfig, match="nested deeper"):
        encode({"a": state})
    with pytest.raises(InvalidCheckpoint, match="nested deeper"):
        decode({"a": encode(state)[0]}, {})


NAN = float("nan")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([], "the state is a list; expected a dict"),
        ({"$counter": [["a"]]}, "the state is a list of 1; expected a list of pairs"),
        ({"a": [{"$tensor": "b"}]}, r"a\[0\] is 'b'; expected the name of a tensor"),
        ({"a": {"$tensor": []}}, "a is a list of 0; expected the name of a tensor"),
        (
            {"a": {"$tensor": "t"}, "b": {"$tensor": "t"}},
            "b is 't'; expected a tensor that nothing",
        ),
        ({}, "nothing in the state refers to tensor 't' and 0 others"),
        ({"a": {"$tuple": [], "b": 1}}, r"a is '\$tuple, b'; expected one key of \$int"),
        ({"a": {"$pickle": "gASVBgAAAA=="}}, r"a is '\$pickle'; expected one key of"),
        ({"a": NAN}, "a is nan; expected a finite number"),
        ({"a": {"$int": "12"}}, "a is '12'; expected a hexadecimal integer"),
        ({"a": {"$float": "7ff8"}}, "8 bytes of a float"),
        ({"a": {"$bytes": "é"}}, "bytes in base64"),
        ({"a": {"$bytes": "A"}}, "bytes in base64"),
        ({"a": {"$text": "/w=="}}, "text in UTF-8"),
        ({"a": {"$set": [1, 1]}}, "elements that differ"),
        ({"a": {"$set": [[]]}}, r"a\[0\] is a list of 0; expected a simple value"),
        ({"a": {"$dict": [[1, 2], [True, 3]]}}, "keys that differ"),
        ({"a": {"$dict": [[{"$tuple": []}, 2]]}}, "expected a simple value, as key"),
        ({"a": {"$module": [[]]}}, "expected pairs and metadata"),
        ({"a": {"$size": [-1]}}, "a list of at most 64 lengths"),
        ({"a": {"$dtype": "load"}}, "a is 'load'; expected a dtype of torch"),
        ({"a": {"$array": ["|O", [1], "t"]}}, r"a is '\|O'; expected a dtype of numpy"),
        ({"a": {"$array": ["<f3", [1], "t"]}}, "a is '<f3'; expected a dtype of numpy"),
        ({"a": {"$array": ["<f8", [2], "t"]}}, r"torch.uint8 of shape \[8\]'; expected bytes of"),
        ({"a": {"$array": ["<f8", [2]]}}, "a dtype, a shape and the name of a tensor"),
        ({"a": {"$scalar": ["<f8", "AA=="]}}, "a is '1 bytes'; expected 8 of float64"),
        ({"a": {"$scalar": "<f8"}}, "a dtype and bytes in base64"),
        ({"a": object()}, "expected a value of JSON"),
    ],
)
def test_json_that_is_no_state_is_refused_by_its_path(value: object, words: str) -> None:
    with pytest.raises(InvalidCheckpoint, match=words):
        decode(value, {"t": torch.zeros(8, dtype=torch.uint8)})
