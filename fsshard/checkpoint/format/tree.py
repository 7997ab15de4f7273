"""State as JSON: numbers, strings and containers as text, tensors by name, nothing executable.

What JSON has is itself there; whatever else is known is an object with its kind under ``"$"``. The kinds are a closed
list: nothing is looked up by a name that a file gives, so a file can bring about no more than the values below.
"""

from __future__ import annotations

import base64
import json
import math
import reprlib
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fsshard.checkpoint.format.index import Tree
from fsshard.checkpoint.format.tensors_file import dtype_name
from fsshard.complex_params.pairs import laid, order_in_memory
from fsshard.errors import CheckpointError
from fsshard.sharded.torch_checkpoint_calls import ByName
from fsshard.state_objects import SavedObject

Put = Callable[[str, Tensor], str]
Get = Callable[[str], Tensor]

# So deep may containers be nested; Python reads JSON that is nested some hundred times.
MAX_DEPTH = 64
_KIND = "$"
_DTYPES = {dtype_name(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_NUMPY_NAMES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
_NUMPY = {name: np.dtype(name) for name in _NUMPY_NAMES}
_FACTORIES: dict[str | None, Any] = {
    None: None,
    "bool": bool,
    "int": int,
    "float": float,
    "complex": complex,
    "str": str,
    "bytes": bytes,
    "list": list,
    "tuple": tuple,
    "dict": dict,
    "set": set,
}
_KEYS = (bool, int, float, complex, str, bytes, np.generic)
_MAPPINGS: Tree = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": Counter,
}
_SEQUENCES: Tree = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}
_LEAVES: dict[str, Callable[[Any], Any]] = {
    "float": {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}.__getitem__,
    "bytes": lambda content: base64.b64decode(content, validate=True),
    "Size": torch.Size,
    "dtype": _DTYPES.__getitem__,
    "device": torch.device,
}


def encode(value: Any, put: Put, path: str = "state") -> Any:
    """Return the JSON tree of a value; ``put`` is told the path of each tensor and the tensor, and gives its name.

    Order of dictionaries is kept; that two places hold the same object is not. What has no tree is a CheckpointError.
    """
    return _node(value, put, path, 0)


def decode(node: Any, get: Get) -> Any:
    """Return the value of a JSON tree, with the tensors that ``get`` gives by their names.

    Raises LookupError, TypeError or ValueError for what is no such tree.
    """
    if isinstance(node, list):
        return [decode(item, get) for item in node]
    if not isinstance(node, dict):
        return node
    if _KIND not in node:
        return _filled({}, node.items(), get)
    kind = node[_KIND]
    content = node["v"]
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](decode(item, get) for item in content)
    if kind in _MAPPINGS:
        return _filled(_MAPPINGS[kind](), content, get)
    if kind == "defaultdict":
        factory = _FACTORIES[node["of"]]
        return _filled(defaultdict(factory), content, get)
    if kind == "complex":
        parts = [decode(part, get) for part in content]
        return complex(*parts)
    if kind == "tensor":
        return laid(get(content), node.get("order", ()))
    if kind == "object":
        return SavedObject(str(node["class"]), _filled({}, content, get))
    if kind == "ndarray":
        array = get(content).detach().cpu().numpy()
        return array.astype(_NUMPY[node["dtype"]], casting="no", copy=False)
    if kind == "numpy":
        dtype = _NUMPY[node["dtype"]]
        return dtype.type(decode(content, get))
    return _LEAVES[kind](content)


def _filled(mapping: Any, pairs: Any, get: Get) -> Any:
    for key, item in pairs:
        new_key = decode(key, get)
        mapping[new_key] = decode(item, get)
    return mapping


def _node(value: Any, put: Put, path: str, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise CheckpointError(f"{path}: nested deeper than {MAX_DEPTH}, or within itself; flatten it")
    if isinstance(value, ByName):  # of an optimizer's state dict
        value = dict(value)
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind in (int, float, complex, bytes):
        return _scalar(value)
    if kind in (dict, OrderedDict, Counter, defaultdict):
        return _mapping(value, put, path, depth)
    if kind is SavedObject:
        return {_KIND: "object", "class": value.kind, "v": _pairs(value.fields, put, path, depth + 1)}
    if kind not in (list, tuple, set, frozenset):
        return _of_libraries(value, put, path)
    nodes = []
    for index, item in enumerate(value):
        node = _node(item, put, _below(path, index), depth + 1)
        nodes.append(node)
    if kind is list:
        return nodes
    if kind is not tuple:
        _check_keys(value, path)
        # Sets of strings come in another order in each process.
        nodes.sort(key=json.dumps)
    return {_KIND: kind.__name__, "v": nodes}


def _scalar(value: Any) -> Any:
    if isinstance(value, bytes):
        return {_KIND: "bytes", "v": base64.b64encode(value).decode()}
    if isinstance(value, complex):
        return {_KIND: "complex", "v": [_scalar(value.real), _scalar(value.imag)]}
    if isinstance(value, float) and not math.isfinite(value):
        return {_KIND: "float", "v": repr(value)}
    return value


def _mapping(value: Any, put: Put, path: str, depth: int) -> Any:
    kind = type(value)
    below = depth + 1
    if kind is dict and _has_plain_keys(value):
        nodes = {}
        for key, item in value.items():
            nodes[key] = _node(item, put, _below(path, key), below)
        return nodes
    _check_keys(value, path)
    pairs = _pairs(value, put, path, below)
    if kind is not defaultdict:
        return {_KIND: kind.__name__, "v": pairs}
    for name, factory in _FACTORIES.items():
        if factory is value.default_factory:
            return {_KIND: "defaultdict", "v": pairs, "of": name}
    raise _unknown(f"{path}, its default factory", value.default_factory)


def _pairs(mapping: Any, put: Put, path: str, depth: int) -> list[Any]:
    pairs = []
    for key, item in mapping.items():
        key_node = _node(key, put, f"{path}, its key", depth)
        item_node = _node(item, put, _below(path, key), depth)
        pairs.append([key_node, item_node])
    return pairs


def _has_plain_keys(mapping: Any) -> bool:
    return _KIND not in mapping and all(type(key) is str for key in mapping)


def _of_libraries(value: Any, put: Put, path: str) -> Any:
    if isinstance(value, Tensor):
        node: Tree = {_KIND: "tensor", "v": put(path, value.detach())}
        if value.layout is torch.strided and order_in_memory(value):
            node["order"] = order_in_memory(value)  # products round by it
        return node
    if isinstance(value, torch.Size):
        return {_KIND: "Size", "v": list(value)}
    if isinstance(value, torch.dtype):
        return {_KIND: "dtype", "v": dtype_name(value)}
    if isinstance(value, torch.device):
        return {_KIND: "device", "v": str(value)}
    if not isinstance(value, (np.generic, np.ndarray)):
        raise _unknown(path, value)
    name = value.dtype.name
    if isinstance(value, np.generic) and name in _NUMPY:
        return {_KIND: "numpy", "dtype": name, "v": _node(value.item(), put, path, 0)}
    if type(value) is np.ndarray and name in _NUMPY:
        # A copy in the machine's byte order: torch takes no other, and warns of arrays that are read-only.
        array = np.array(value, dtype=_NUMPY[name], order="C")
        return {_KIND: "ndarray", "dtype": name, "v": put(path, torch.from_numpy(array))}
    raise _unknown(path, value)


def _check_keys(keys: Iterable[Any], path: str) -> None:
    for key in keys:
        if isinstance(key, (tuple, frozenset)):
            _check_keys(key, path)
        elif key is not None and not isinstance(key, _KEYS):
            raise _unknown(f"{path}, its key {reprlib.repr(key)}", key)


def _below(path: str, key: Any) -> str:
    if isinstance(key, str) and key.isidentifier():
        return f"{path}.{key}"
    return f"{path}[{reprlib.repr(key)}]"


def _unknown(path: str, value: Any) -> CheckpointError:
    kind = type(value)
    name = kind.__qualname__
    if kind.__module__ != "builtins":
        name = f"{kind.__module__}.{name}"
    if isinstance(value, (np.ndarray, np.generic)):
        name += f" of {value.dtype}"
    return CheckpointError(
        f"{path}: expected numbers, strings, tensors and containers of them, got a {name} ({reprlib.repr(value)})"
    )
