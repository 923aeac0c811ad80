"""A worker's own state as JSON and tensors, and back, without pickle.

Rules:
    - None, bool, text, lists, finite floats, integers of up to 53 bits and dicts whose keys are
      texts that do not begin with "$" are themselves in JSON. Any other value is an object with one
      key, the tag: ``{"$tuple": [...]}``, ``{"$tensor": "name"}``. `_DECODERS` has all tags.
    - Types are exact, and only those of `ACCEPTED`: a subclass (an enum, a named tuple, a
      defaultdict, whose factory is code) is refused. Only a `torch.nn.Parameter` becomes a tensor.
    - An OrderedDict keeps the `_metadata` of `torch.nn.Module.state_dict`.
    - A numpy array is a tensor of its bytes, so every dtype of numbers and of times comes back.
    - Tensors and arrays are copied, each in full: views and tied ones come back contiguous and
      separate. Devices are not saved.
    - The state refers to every tensor exactly once.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from ps_core.errors import InvalidCheckpoint, InvalidConfig
from ps_core.limits import MAX_STATE_DEPTH, MAX_STATE_VALUE_COUNT

ACCEPTED = (
    "None, bool, int, float, str, bytes, list, tuple, set, frozenset, dict, OrderedDict, Counter, "
    "torch tensors, dtypes and sizes, numpy arrays and numbers"
)

SIMPLE = (type(None), bool, int, float, str, bytes)
"""The types of the keys of a dict and the elements of a set."""

TENSOR_DTYPES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16",
    torch.uint16: "U16", torch.int32: "I32", torch.uint32: "U32", torch.int64: "I64",
    torch.uint64: "U64", torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32",
    torch.float64: "F64", torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2", torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}  # fmt: skip
"""The dtypes of safetensors files, and their names there."""

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}
_ARRAY_KINDS = "biufcmM"
_ARRAY_DTYPE = re.compile(r"[<>|=][biufcmM][0-9]{1,2}(\[[^\[\]]{1,32}\])?")
_HEX = re.compile(r"-?0x[0-9a-f]+")
_PLAIN_INT_BITS = 53
"""Every parser of JSON has integers of so many bits."""

_RESERVED_NAMES = ("", "__metadata__")
_MAX_NAME_CHARACTERS = 200
_MAX_SHOWN_CHARACTERS = 120
_MAX_DIMENSION_COUNT = 64
"""numpy's own limit."""


class _Path(NamedTuple):
    """The place of a value in the state; made for every value, formatted only for messages."""

    parent: _Path | None = None
    key: object = None
    depth: int = 0

    def to(self, key: object) -> _Path:
        return _Path(self, key, self.depth + 1)

    def __str__(self) -> str:
        steps: list[str] = []
        here = self
        while here.parent is not None:
            key, here = here.key, here.parent
            is_name = type(key) is str and key.isidentifier() and key.isascii()
            steps.append(f".{key}" if is_name else f"[{shown(key)}]")
        return "".join(reversed(steps)).removeprefix(".") or "the state"


def encode(state: Mapping[str, Any]) -> tuple[Any, dict[str, torch.Tensor]]:
    """Nested `state_dict`s as a value for JSON, and copies of the tensors that it refers to, on the
    CPU, contiguous, by their paths.

    Raises:
        InvalidConfig: a value is not `ACCEPTED`, is nested too deep (also in itself), or is one too
            many; the message has its path.
    """
    if not isinstance(state, Mapping):
        raise InvalidConfig(f"the state is a {_name(type(state))}; expected a dict")
    encoder = _Encoder()
    return encoder.value(state, _Path()), encoder.tensors


def decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> dict[Any, Any]:
    """The inverse of `encode`, with the tensors of `tensors` and copies of arrays;
    InvalidCheckpoint has the path of a malformed value.
    """
    decoder = _Decoder(tensors)
    state = decoder.value(value, _Path())
    if not isinstance(state, dict):
        raise InvalidCheckpoint(f"the state is a {_name(type(state))}; expected a dict")
    if decoder.unused:
        extra = min(decoder.unused)
        raise InvalidCheckpoint(
            f"nothing in the state refers to tensor {extra!r} and {len(decoder.unused) - 1} others"
        )
    return state


def tensor_names(value: Any) -> set[str]:
    """The names of the tensors that a value of JSON refers to."""
    found, rest = set(), [value]
    while rest:
        here = rest.pop()
        if isinstance(here, list):
            rest += here
        elif isinstance(here, dict):
            rest += here.values()
            array = here.get("$array")
            name = array[-1] if isinstance(array, list) and array else here.get("$tensor")
            if isinstance(name, str):
                found.add(name)
    return found


class _Encoder:
    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._count = 0

    def value(self, value: Any, at: _Path) -> Any:
        kind = type(value)
        encoder = _ENCODERS.get(kind)
        if encoder is None and isinstance(value, np.generic):
            encoder = _Encoder._scalar
        if encoder is None:
            raise InvalidConfig(f"{at} is a {_name(kind)}; a state may have {ACCEPTED}")
        self._count += 1
        if at.depth > MAX_STATE_DEPTH:
            raise InvalidConfig(f"{at} is nested deeper than {MAX_STATE_DEPTH}")
        if self._count > MAX_STATE_VALUE_COUNT:
            raise InvalidConfig(
                f"{at} is one value too many: a state may have {MAX_STATE_VALUE_COUNT}, and a "
                "tensor or an array of any size is one"
            )
        return encoder(self, value, at)

    def _itself(self, value: Any, _at: _Path) -> Any:
        return value

    def _int(self, value: int, _at: _Path) -> Any:
        # hexadecimal, because Python refuses to parse more than 4300 decimal digits
        return value if value.bit_length() <= _PLAIN_INT_BITS else {"$int": hex(value)}

    def _float(self, value: float, _at: _Path) -> Any:
        return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}

    def _text(self, value: str, _at: _Path) -> Any:
        if _is_plain(value):
            return value
        # lone surrogates, as in file names: JSON would join two of them into one letter
        return {"$text": _base64(value.encode("utf-8", "surrogatepass"))}

    def _bytes(self, value: bytes, _at: _Path) -> Any:
        return {"$bytes": _base64(value)}

    def _list(self, value: list[Any] | tuple[Any, ...], at: _Path) -> list[Any]:
        return [self.value(item, at.to(index)) for index, item in enumerate(value)]

    def _set(self, value: set[Any] | frozenset[Any], at: _Path) -> Any:
        elements = [self._simple(element, at.to(element)) for element in value]
        return {f"${type(value).__name__}": sorted(elements, key=json.dumps)}

    def _simple(self, value: Any, at: _Path) -> Any:
        if type(value) not in SIMPLE:
            raise InvalidConfig(
                f"{at}: a {_name(type(value))} as key or element; expected one of "
                f"{', '.join(_name(kind) for kind in SIMPLE)}"
            )
        return self.value(value, at)

    def _dict(self, value: dict[Any, Any], at: _Path) -> Any:
        if all(type(key) is str and key[:1] != "$" and _is_plain(key) for key in value):
            return {key: self.value(item, at.to(key)) for key, item in value.items()}
        return {"$dict": self._pairs(value, at)}

    def _pairs(self, value: dict[Any, Any], at: _Path) -> list[Any]:
        return [
            [self._simple(key, at.to(key)), self.value(item, at.to(key))]
            for key, item in value.items()
        ]

    def _ordered(self, value: OrderedDict[Any, Any], at: _Path) -> Any:
        attributes = dict(vars(value))
        metadata = attributes.pop("_metadata", None)
        if attributes:
            raise InvalidConfig(
                f"{at} is an OrderedDict with attributes of its own: {', '.join(attributes)}; only "
                "_metadata, which torch's modules set, is saved"
            )
        pairs = self._pairs(value, at)
        if metadata is None:
            return {"$ordered": pairs}
        return {"$module": [pairs, self.value(metadata, at.to("_metadata"))]}

    def _tensor(self, value: torch.Tensor, at: _Path) -> Any:
        if value.layout is not torch.strided or value.dtype not in TENSOR_DTYPES or value.is_meta:
            expected = ", ".join(sorted(str(dtype) for dtype in TENSOR_DTYPES))
            raise InvalidConfig(
                f"{at} is a tensor of {value.dtype}, {value.layout}, on {value.device}; expected a "
                f"dense one, with values, of one of {expected}"
            )
        copy = torch.empty(value.shape, dtype=value.dtype, device="cpu")
        return {"$tensor": self._add(copy.copy_(value.detach()), at)}

    def _array(self, value: npt.NDArray[Any], at: _Path) -> Any:
        self._check_kind(value.dtype, at)
        raw = torch.from_numpy(np.array(value, order="C").reshape(-1).view(np.uint8))
        return {"$array": [value.dtype.str, list(value.shape), self._add(raw, at)]}

    def _scalar(self, value: np.generic, at: _Path) -> Any:
        self._check_kind(value.dtype, at)
        return {"$scalar": [value.dtype.str, _base64(value.tobytes())]}

    def _dtype(self, value: torch.dtype, _at: _Path) -> Any:
        return {"$dtype": str(value).removeprefix("torch.")}

    def _check_kind(self, dtype: np.dtype[Any], at: _Path) -> None:
        if dtype.kind not in _ARRAY_KINDS:
            raise InvalidConfig(
                f"{at} is of numpy's dtype {dtype}; expected one of booleans, numbers or times"
            )

    def _add(self, tensor: torch.Tensor, at: _Path) -> str:
        path = str(at)[:_MAX_NAME_CHARACTERS]
        name, number = path, len(self.tensors)
        while name in self.tensors or name in _RESERVED_NAMES:
            name, number = f"{path}#{number}", number + 1
        self.tensors[name] = tensor
        return name


_Writer: TypeAlias = Callable[[_Encoder, Any, _Path], Any]


def _tagged(tag: str, write: _Writer) -> _Writer:
    return lambda encoder, value, at: {tag: write(encoder, value, at)}


_ENCODERS: dict[type, _Writer] = {
    type(None): _Encoder._itself,
    bool: _Encoder._itself,
    int: _Encoder._int,
    float: _Encoder._float,
    str: _Encoder._text,
    bytes: _Encoder._bytes,
    list: _Encoder._list,
    tuple: _tagged("$tuple", _Encoder._list),
    torch.Size: _tagged("$size", _Encoder._list),
    set: _Encoder._set,
    frozenset: _Encoder._set,
    dict: _Encoder._dict,
    Counter: _tagged("$counter", _Encoder._pairs),
    OrderedDict: _Encoder._ordered,
    torch.Tensor: _Encoder._tensor,
    torch.nn.Parameter: _Encoder._tensor,
    np.ndarray: _Encoder._array,
    torch.dtype: _Encoder._dtype,
}


class _Decoder:
    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self.unused = set(tensors)

    def value(self, value: Any, at: _Path) -> Any:
        if at.depth > MAX_STATE_DEPTH:
            _refuse(at, f"a value nested deeper than {MAX_STATE_DEPTH}", "")
        if isinstance(value, float) and not math.isfinite(value):
            _refuse(at, value, "a finite number, or one under $float")
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, list):
            return self._list(value, at)
        if not isinstance(value, dict):
            _refuse(at, value, "a value of JSON")
        tag = next((key for key in value if str(key).startswith("$")), None)
        if tag is None:
            return {key: self.value(item, at.to(key)) for key, item in value.items()}
        decoder = _DECODERS.get(tag)
        if decoder is None or len(value) != 1:
            _refuse(at, ", ".join(map(str, value)), f"one key of {', '.join(_DECODERS)}")
        return decoder(self, value[tag], at)

    def _int(self, body: Any, at: _Path) -> int:
        _check(isinstance(body, str) and _HEX.fullmatch(body), at, body, "a hexadecimal integer")
        return int(body, 16)

    def _float(self, body: Any, at: _Path) -> float:
        is_hex = isinstance(body, str) and re.fullmatch("[0-9a-f]{16}", body)
        _check(is_hex, at, body, "8 bytes of a float, in hexadecimal")
        number: float = struct.unpack(">d", bytes.fromhex(body))[0]
        return number

    def _text(self, body: Any, at: _Path) -> str:
        try:
            return self._bytes(body, at).decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            _refuse(at, body, "text in UTF-8, in base64")

    def _bytes(self, body: Any, at: _Path) -> bytes:
        _check(isinstance(body, str) and body.isascii(), at, body, "bytes in base64")
        try:
            return base64.b64decode(body, validate=True)
        except binascii.Error:
            _refuse(at, body, "bytes in base64")

    def _list(self, body: Any, at: _Path) -> list[Any]:
        _check(isinstance(body, list), at, body, "a list")
        return [self.value(item, at.to(index)) for index, item in enumerate(body)]

    def _lengths(self, body: Any, at: _Path) -> list[int]:
        is_list = isinstance(body, list) and len(body) <= _MAX_DIMENSION_COUNT
        is_right = is_list and all(type(n) is int and 0 <= n < 1 << 63 for n in body)
        _check(is_right, at, body, f"a list of at most {_MAX_DIMENSION_COUNT} lengths")
        return list(body)

    def _set(self, body: Any, at: _Path) -> set[Any]:
        _check(isinstance(body, list), at, body, "a list")
        elements = {self._simple(item, at.to(index)) for index, item in enumerate(body)}
        _check(len(elements) == len(body), at, body, "elements that differ")
        return elements

    def _simple(self, body: Any, at: _Path) -> Any:
        value = self.value(body, at)
        _check(type(value) in SIMPLE, at, body, "a simple value, as key or element")
        return value

    def _dict(self, body: Any, at: _Path) -> dict[Any, Any]:
        is_list = isinstance(body, list) and all(_is_list(pair, 2) for pair in body)
        _check(is_list, at, body, "a list of pairs")
        result: dict[Any, Any] = {}
        for index, (key, item) in enumerate(body):
            name = self._simple(key, at.to(index))
            result[name] = self.value(item, at.to(name))
        _check(len(result) == len(body), at, body, "keys that differ")
        return result

    def _module(self, body: Any, at: _Path) -> OrderedDict[Any, Any]:
        _check(_is_list(body, 2), at, body, "pairs and metadata")
        state = OrderedDict(self._dict(body[0], at))
        vars(state)["_metadata"] = self.value(body[1], at.to("_metadata"))
        return state

    def _tensor(self, body: Any, at: _Path) -> torch.Tensor:
        is_name = isinstance(body, str) and body in self._tensors
        _check(is_name, at, body, "the name of a tensor of the file")
        _check(body in self.unused, at, body, "a tensor that nothing else in the state refers to")
        self.unused.remove(body)
        return self._tensors[body]

    def _array(self, body: Any, at: _Path) -> npt.NDArray[Any]:
        _check(_is_list(body, 3), at, body, "a dtype, a shape and the name of a tensor")
        dtype, shape = self._array_dtype(body[0], at), self._lengths(body[1], at)
        raw = self._tensor(body[2], at)
        if raw.dtype is not torch.uint8 or raw.shape != (math.prod(shape) * dtype.itemsize,):
            _refuse(at, f"{raw.dtype} of shape {list(raw.shape)}", f"bytes of {dtype} for {shape}")
        try:
            return raw.contiguous().numpy().view(dtype).reshape(shape).copy()
        except ValueError:  # an empty array of a shape that no array can have
            _refuse(at, shape, "a shape that numpy can hold")

    def _scalar(self, body: Any, at: _Path) -> Any:
        _check(_is_list(body, 2), at, body, "a dtype and bytes in base64")
        dtype, raw = self._array_dtype(body[0], at), self._bytes(body[1], at)
        if len(raw) != dtype.itemsize:
            _refuse(at, f"{len(raw)} bytes", f"{dtype.itemsize} of {dtype}")
        return np.frombuffer(raw, dtype)[0]

    def _array_dtype(self, body: Any, at: _Path) -> np.dtype[Any]:
        dtype = None
        if isinstance(body, str) and _ARRAY_DTYPE.fullmatch(body):
            with suppress(TypeError, ValueError, OverflowError):
                dtype = np.dtype(body)
        if dtype is None or dtype.str != body:
            _refuse(at, body, "a dtype of numpy, of booleans, numbers or times")
        return dtype

    def _dtype(self, body: Any, at: _Path) -> torch.dtype:
        _check(isinstance(body, str) and body in _DTYPES, at, body, "a dtype of torch")
        return _DTYPES[body]


_Reader: TypeAlias = Callable[[_Decoder, Any, _Path], Any]


def _as(kind: Callable[[Any], Any], read: _Reader) -> _Reader:
    return lambda decoder, body, at: kind(read(decoder, body, at))


_DECODERS: dict[str, _Reader] = {
    "$int": _Decoder._int,
    "$float": _Decoder._float,
    "$text": _Decoder._text,
    "$bytes": _Decoder._bytes,
    "$tuple": _as(tuple, _Decoder._list),
    "$size": _as(torch.Size, _Decoder._lengths),
    "$set": _Decoder._set,
    "$frozenset": _as(frozenset, _Decoder._set),
    "$dict": _Decoder._dict,
    "$counter": _as(Counter, _Decoder._dict),
    "$ordered": _as(OrderedDict, _Decoder._dict),
    "$module": _Decoder._module,
    "$tensor": _Decoder._tensor,
    "$array": _Decoder._array,
    "$scalar": _Decoder._scalar,
    "$dtype": _Decoder._dtype,
}


def _refuse(at: _Path, came: object, expected: str) -> NoReturn:
    raise InvalidCheckpoint(f"{at} is {shown(came)}; expected {expected}")


def _check(is_right: object, at: _Path, came: object, expected: str) -> None:
    if not is_right:
        _refuse(at, came, expected)


def _is_list(value: Any, length: int) -> bool:
    return isinstance(value, list) and len(value) == length


def shown(value: object) -> str:
    """A value for a message: short, in ASCII, and without an error of its own."""
    if type(value) is int and value.bit_length() > 64:  # Python refuses to format huge ones
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, list | dict):
        return f"a {type(value).__name__} of {len(value)}"
    text = ascii(value)
    return text if len(text) <= _MAX_SHOWN_CHARACTERS else f"{text[:_MAX_SHOWN_CHARACTERS]}..."


def _is_plain(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _base64(raw: bytes) -> str:
    return base64.b64encode(raw).decode("ascii")


def _name(kind: type) -> str:
    is_plain = kind.__module__ in ("builtins", "collections")
    return kind.__qualname__ if is_plain else f"{kind.__module__}.{kind.__qualname__}"
