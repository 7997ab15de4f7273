"""State as JSON: numbers, strings and containers as text, tensors by name, nothing executable.

A list, a dictionary of strings, None, a bool, an integer, a finite number and a string are themselves in JSON; whatever
else is known is an object with its kind under ``"$"``. The kinds are a closed list: nothing is looked up by a name that
a file gives, so a file can bring about no more than the values below.
"""

from __future__ import annotations

import base64
import json
import math
import reprlib
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fsshard.checkpoint.format.dtypes import dtype_name
from fsshard.checkpoint.format.strict_json import MAX_DIGITS
from fsshard.errors import CheckpointError, CorruptCheckpoint

__all__ = ["MAX_DEPTH", "decode", "encode"]

Put = Callable[[str, Tensor], str]
Get = Callable[[str], Tensor]

MAX_DEPTH = 64
"""Containers within containers."""

MAX_VALUES = 10_000_000
"""Values in a tree, each counted where it stands: lists within lists that are shared can stand for any number."""

_KIND = "$"
_LARGEST = 10**MAX_DIGITS
_DTYPES = {dtype_name(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_NUMPY = {
    dtype.__name__.rstrip("_"): np.dtype(dtype)
    for dtype in (
        *(np.bool_, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64),
        *(np.float16, np.float32, np.float64, np.complex64, np.complex128),
    )
}
_FACTORIES: dict[str, Any] = {
    kind.__name__: kind for kind in (bool, int, float, complex, str, bytes, list, tuple, dict, set)
}
_MAPPINGS: dict[str, Any] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_SEQUENCES: dict[str, Any] = {"tuple": tuple, "set": set, "frozenset": frozenset}


def encode(value: Any, put: Put, path: str = "state") -> Any:
    """The JSON tree of a value. Order of dictionaries is kept; that two places hold the same object is not.

    Args:
        value: None, bool, int, float, complex, str, bytes; list, tuple, set, frozenset, dict, OrderedDict, Counter,
            defaultdict of a plain kind (keys: the scalar kinds, and tuples of them); torch.Size, torch.dtype,
            torch.device; numpy's scalars and arrays of numbers; tensors.
        put: told the path of each tensor and the tensor; gives the name that stands for it.
        path: of the value, for messages and ``put``.

    Raises:
        CheckpointError: it holds anything else; the message says where and what.
    """
    return _Encoder(put).node(value, path, 0)


def decode(node: Any, get: Get, path: str = "state") -> Any:
    """The value of a JSON tree.

    Args:
        node: what :func:`encode` gave, as JSON text brings it back.
        get: gives the tensor of a name; a LookupError of it means that there is none.
        path: of the value, for messages.

    Raises:
        CorruptCheckpoint: it is no such tree.
    """
    return _Decoder(get).value(node, path, 0)


def _below(path: str, key: Any) -> str:
    if isinstance(key, str) and key.isidentifier():
        return f"{path}.{key}"
    return f"{path}[{_short_repr(key)}]"


def _short_repr(value: Any) -> str:
    try:
        return reprlib.repr(value)
    except Exception:  # of somebody's __repr__, or of an integer with too many digits
        return f"<{type(value).__name__}>"


def _is_key(value: Any) -> bool:
    if isinstance(value, (tuple, frozenset)):
        return all(map(_is_key, value))
    return value is None or isinstance(value, (bool, int, float, complex, str, bytes, np.generic))


class _Encoder:
    def __init__(self, put: Put) -> None:
        self._put = put
        self._count = 0

    def node(self, value: Any, path: str, depth: int) -> Any:
        self._count += 1
        if self._count > MAX_VALUES:
            raise CheckpointError(f"{path}: more than {MAX_VALUES} values; are containers shared? Save tensors instead")
        if depth > MAX_DEPTH:
            raise CheckpointError(f"{path}: nested deeper than {MAX_DEPTH}, or within itself; flatten it")
        kind = type(value)
        if value is None or kind in (bool, str):
            return value
        if kind in (int, float, complex, bytes):
            return self._scalar(value, path)
        if kind is list:
            return [self.node(item, _below(path, index), depth + 1) for index, item in enumerate(value)]
        if kind in (dict, OrderedDict, Counter, defaultdict):
            return self._mapping(value, path, depth)
        if kind in (tuple, set, frozenset):
            nodes = [self.node(item, _below(path, index), depth + 1) for index, item in enumerate(value)]
            if kind is not tuple:
                self._check_keys(value, path)
                nodes.sort(key=json.dumps)  # sets of strings come in another order in each process
            return {_KIND: kind.__name__, "v": nodes}
        return self._of_libraries(value, path)

    def _scalar(self, value: Any, path: str) -> Any:
        if isinstance(value, bytes):
            return {_KIND: "bytes", "v": base64.b64encode(value).decode()}
        if isinstance(value, complex):
            return {_KIND: "complex", "v": [self._scalar(value.real, path), self._scalar(value.imag, path)]}
        if isinstance(value, int) and abs(value) >= _LARGEST:
            raise CheckpointError(f"{path}: an integer of more than {MAX_DIGITS} digits; keep it as bytes")
        if isinstance(value, float) and not math.isfinite(value):
            return {_KIND: "float", "v": repr(value)}
        return value

    def _mapping(self, value: Any, path: str, depth: int) -> Any:
        kind = type(value)
        if kind is dict and all(type(key) is str for key in value) and _KIND not in value:
            return {key: self.node(item, _below(path, key), depth + 1) for key, item in value.items()}
        self._check_keys(value, path)
        pairs = [
            [
                self.node(key, f"{path}, its key {_short_repr(key)}", depth + 1),
                self.node(item, _below(path, key), depth + 1),
            ]
            for key, item in value.items()
        ]
        node: dict[str, Any] = {_KIND: kind.__name__, "v": pairs}
        if kind is defaultdict:
            factory = value.default_factory
            if factory is not None and factory not in _FACTORIES.values():
                raise _unknown(f"{path}, its default factory", factory)
            node["of"] = None if factory is None else factory.__name__
        return node

    def _of_libraries(self, value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            return {_KIND: "tensor", "v": self._put(path, value.detach())}
        if isinstance(value, torch.Size):
            return {_KIND: "Size", "v": list(value)}
        if isinstance(value, torch.dtype):
            return {_KIND: "dtype", "v": dtype_name(value)}
        if isinstance(value, torch.device):
            return {_KIND: "device", "v": str(value)}
        if isinstance(value, np.generic) and value.dtype.name in _NUMPY:
            return {_KIND: "numpy", "dtype": value.dtype.name, "v": self.node(value.item(), path, 0)}
        if type(value) is np.ndarray and value.dtype.name in _NUMPY:
            # A copy in the machine's byte order: torch takes no other, and warns of arrays that are read-only.
            tensor = torch.from_numpy(np.array(value, dtype=_NUMPY[value.dtype.name], order="C"))
            return {_KIND: "ndarray", "dtype": value.dtype.name, "v": self._put(path, tensor)}
        raise _unknown(path, value)

    def _check_keys(self, keys: Iterable[Any], path: str) -> None:
        for key in keys:
            if not _is_key(key):
                raise _unknown(f"{path}, its key {_short_repr(key)}", key)


def _unknown(path: str, value: Any) -> CheckpointError:
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(value, (np.ndarray, np.generic)):
        name += f" of {value.dtype}"
    return CheckpointError(
        f"{path}: a {name} ({_short_repr(value)}); checkpoints hold numbers, strings, tensors and containers of them"
    )


class _Decoder:
    def __init__(self, get: Get) -> None:
        self._get = get

    def value(self, node: Any, path: str, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise CorruptCheckpoint(f"{path}: nested deeper than {MAX_DEPTH}")
        kind = type(node)
        if node is None or kind in (bool, str) or (kind is float and math.isfinite(node)):
            return node
        if kind is int and abs(node) < _LARGEST:
            return node
        if kind is list:
            return [self.value(item, _below(path, index), depth + 1) for index, item in enumerate(node)]
        if kind is dict and _KIND not in node and all(type(key) is str for key in node):
            return {key: self.value(item, _below(path, key), depth + 1) for key, item in node.items()}
        if kind is dict and type(node.get(_KIND)) is str:
            return self._tagged(node[_KIND], node, path, depth)
        raise CorruptCheckpoint(f"{path}: a checkpoint cannot hold this value: {_short_repr(node)}")

    def _tagged(self, kind: str, node: Mapping[str, Any], path: str, depth: int) -> Any:
        try:
            return self._of_kind(kind, node["v"], node, path, depth)
        except CorruptCheckpoint:
            raise
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):  # another content
            raise CorruptCheckpoint(
                f"{path}: no {kind[:40]!r} that a checkpoint holds: {_short_repr(dict(node))}"
            ) from None

    def _of_kind(self, kind: str, content: Any, node: Mapping[str, Any], path: str, depth: int) -> Any:
        if kind in _SEQUENCES or kind == "complex":
            values = [self.value(item, _below(path, index), depth + 1) for index, item in enumerate(content)]
            return complex(*values) if kind == "complex" else _SEQUENCES[kind](values)
        if kind in _MAPPINGS:
            return self._filled(_MAPPINGS[kind](), content, path, depth)
        if kind == "defaultdict":
            factory = None if node["of"] is None else _FACTORIES[node["of"]]
            return self._filled(defaultdict(factory), content, path, depth)
        if kind == "tensor":
            return self._get(content)
        if kind == "ndarray":
            array = self._get(content).detach().cpu().numpy()
            if array.dtype != _NUMPY[node["dtype"]]:
                raise TypeError(array.dtype)
            return array
        if kind == "numpy":
            return _NUMPY[node["dtype"]].type(self.value(content, path, MAX_DEPTH - 1))
        return _LEAVES[kind](content)

    def _filled(self, found: Any, pairs: Any, path: str, depth: int) -> Any:
        for key_node, item in pairs:
            key = self.value(key_node, f"{path}, a key", depth + 1)
            found[key] = self.value(item, _below(path, key), depth + 1)
        return found


_LEAVES: dict[str, Callable[[Any], Any]] = {
    "float": {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}.__getitem__,
    "bytes": lambda content: base64.b64decode(content, validate=True),
    "Size": torch.Size,
    "dtype": _DTYPES.__getitem__,
    "device": torch.device,
}
