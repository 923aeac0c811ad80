"""The values of collective calls as bytes, and the words by which workers know the same call.

Rules:
    - Workers that make the same call describe it by the same words: the call, its name, and for a
      reduction the shapes and dtypes of the values.
"""

from __future__ import annotations

import hashlib
import json
import struct
from typing import Any

import numpy as np
import torch

from ps_core import limits
from ps_core.collective_calls import Round
from ps_core.errors import InvalidCheckpoint, InvalidConfig, InvalidTensor
from ps_worker.checkpoint.state_codec import decode, encode

_LENGTH = struct.Struct("<I")


def packed(value: Any, verb: str) -> bytes:
    """A value as bytes; see `ps_worker.checkpoint.state_codec.ACCEPTED`."""
    state, tensors = encode({"value": value})
    header = json.dumps(
        {
            "state": state,
            "tensors": [
                [name, str(one.dtype).removeprefix("torch."), list(one.shape)]
                for name, one in tensors.items()
            ],
        }
    ).encode()
    raws = [
        one.reshape(-1).view(torch.uint8).numpy().tobytes() if one.numel() else b""
        for one in tensors.values()
    ]
    byte_count = _LENGTH.size + len(header) + sum(map(len, raws))
    if byte_count > limits.MAX_COLLECTIVE_BYTES:
        raise InvalidTensor(
            f"{verb} was given {byte_count} bytes; expected at most {limits.MAX_COLLECTIVE_BYTES}. "
            "Push larger values to a table: Aggregate() sums, FromRank0() gives out rank 0's values"
        )
    return b"".join((_LENGTH.pack(len(header)), header, *raws))


def unpacked(payload: bytes) -> Any:
    """The inverse of `packed`; tensors are on the CPU."""
    try:
        (length,) = _LENGTH.unpack_from(payload)
        begin = _LENGTH.size + length
        header = json.loads(payload[_LENGTH.size : begin])
        tensors = {}
        for name, dtype, shape in header["tensors"]:
            empty = torch.empty(shape, dtype=getattr(torch, dtype))
            end = begin + empty.nbytes
            if empty.nbytes:
                raw = np.frombuffer(bytearray(payload[begin:end]), np.uint8)
                empty = torch.from_numpy(raw).view(empty.dtype).reshape(shape)
            tensors[name], begin = empty, end
        return decode(header["state"], tensors)["value"]
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise InvalidTensor(f"a worker's value is of another version: {error}") from error
    except InvalidCheckpoint as error:
        raise InvalidTensor(f"a worker's value is of another version: {error.message}") from error


def words_of(verb: str, name: str, what: str = "") -> str:
    """The description of a call, the same at every worker that makes the same call."""
    words = verb + f" '{name}'" * bool(name) + f" of {what}" * bool(what)
    raw = words.encode()
    if len(raw) <= limits.MAX_COLLECTIVE_CALL_BYTES:
        return words
    digest = hashlib.sha256(raw).hexdigest()[:16]
    beginning = raw[: limits.MAX_COLLECTIVE_CALL_BYTES - 32].decode(errors="ignore")
    return f"{beginning}... ({digest})"


def check_agreement(ended: Round) -> None:
    """Refuse a round in which workers made different calls, or that failed."""
    first = ended.shares[0]
    for share in ended.shares[1:]:
        if share.call != first.call:
            raise InvalidConfig(
                f"workers made different collective calls: rank {first.rank} called {first.call}, "
                f"rank {share.rank} called {share.call}. Every worker makes the same calls in the "
                "same order; this one failed for all of them"
            )
    if ended.problem:
        raise InvalidTensor(f"{first.call}: {ended.problem}")
