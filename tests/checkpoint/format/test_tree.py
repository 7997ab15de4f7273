"""Trees: what goes in comes out, bit by bit and kind by kind; what is hostile does not come in."""

from __future__ import annotations

import json
import math
import random
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.optim import lr_scheduler

from fsshard.checkpoint.format.tree import MAX_DEPTH, decode, encode
from fsshard.errors import CheckpointError


def through_json(value: Any) -> Any:
    """Return what comes back of ``value`` from the text of a file and tensors by name."""
    tensors = {}

    def put(path: str, tensor: Tensor) -> str:
        tensors[path] = tensor
        return path

    text = json.dumps(encode(value, put, "it"), allow_nan=False)
    return decode(json.loads(text), tensors.__getitem__)


def same(one: Any, other: Any) -> bool:
    """Equal in kind, order and bits."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.dtype is other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype.newbyteorder("=") == other.dtype and one.shape == other.shape and (one == other).all()
    if isinstance(one, dict):
        if isinstance(one, defaultdict) and one.default_factory is not other.default_factory:
            return False
        return same(list(one.items()), list(other.items()))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, (float, complex, np.generic)):
        return repr(one) == repr(other)
    return bool(one == other)


PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**99), 10**99),
    st.floats(),
    st.complex_numbers(),
    st.text(st.characters()),
    st.binary(),
)
"""Numbers and texts of every kind: infinite and nan, surrogates, zeros with a sign."""
NESTED = st.recursive(
    PLAIN,
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(st.one_of(st.text(), st.just("$")), inner),
        st.dictionaries(PLAIN, inner),
    ),
    max_leaves=12,
)


@given(NESTED)
def test_plain_values_come_back(value: Any) -> None:
    assert same(value, through_json(value))


VALUES = [
    {True: 1, False: 0},
    [{1, "a", (2, 3), None}, frozenset({1.5}), set(), {frozenset({1})}],
    OrderedDict([("b", 1), ("a", OrderedDict())]),
    Counter({30: 1, 10: 2}),
    [defaultdict(list, {1: [2]}), defaultdict(None, {"a": 1}), defaultdict(float)],
    [torch.Size([2, 0, 3]), torch.bfloat16, torch.qint8, torch.device("cpu"), torch.device("cuda", 1)],
    [np.float32(0.1), np.float64(0.1), np.float16("nan"), np.bool_(True), np.int8(-3), np.uint64(2**64 - 1)],
    [np.complex64(1 + 2j), np.complex128(complex(math.nan, 1)), {np.int64(3): np.int64(4)}],
    [np.arange(6).reshape(2, 3), np.zeros((0, 2), np.uint16), np.array(3.5), np.ones(3, bool), np.eye(3)[::2]],
    [np.arange(4, dtype=">i4"), np.ones(2, np.complex128)],
    [torch.ones(2, 3), torch.tensor(1, dtype=torch.int16), torch.zeros(0), {"x": (torch.tensor(1j),)}],
    random.Random(3).getstate(),
    np.random.RandomState(3).get_state(),
    np.random.default_rng(3).bit_generator.state,
    torch.get_rng_state(),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:30])
def test_comes_back(value: Any) -> None:
    assert same(value, through_json(value))


def test_put_is_told_paths_and_plain_tensors() -> None:
    told = []
    parameter = torch.nn.Parameter(torch.ones(2))
    value = {"a": [0, {"b c": parameter}], "d": np.ones(2)}
    node = encode(value, lambda path, tensor: told.append((path, tensor)) or path, "user")
    assert [path for path, _ in told] == ["user.a[1]['b c']", "user.d"]
    assert type(told[0][1]) is Tensor and not told[0][1].requires_grad and told[0][1].data_ptr() == parameter.data_ptr()
    assert node["a"][1]["b c"] == {"$": "tensor", "v": "user.a[1]['b c']"}


def test_a_numpy_array_is_a_snapshot() -> None:
    array = np.zeros(3)
    array.setflags(write=False)
    kept = []
    encode(array, lambda path, tensor: kept.append(tensor) or "x")
    array.setflags(write=True)
    array[:] = 1
    assert kept[0].tolist() == [0, 0, 0]


class Rule:
    def __init__(self) -> None:
        self.rate, self.seen = 0.9, Counter({1: 2})

    def __call__(self, epoch: int) -> float:
        return self.rate**epoch


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda of: lr_scheduler.LambdaLR(of, Rule()),
    "MultiStepLR": lambda of: lr_scheduler.MultiStepLR(of, [2, 2, 5]),
    "SequentialLR": lambda of: lr_scheduler.SequentialLR(
        of, [lr_scheduler.ConstantLR(of), lr_scheduler.ExponentialLR(of, 0.9)], [2]
    ),
    "CyclicLR": lambda of: lr_scheduler.CyclicLR(of, 0.01, 0.1, scale_fn=Rule()),
    "OneCycleLR": lambda of: lr_scheduler.OneCycleLR(of, 0.1, total_steps=9),
    "ReduceLROnPlateau": lambda of: lr_scheduler.ReduceLROnPlateau(of),
}
"""Schedulers of torch whose state is more than numbers."""


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_of_torch(name: str) -> None:
    scheduler = SCHEDULERS[name](torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9))
    for loss in (1.0, 2.0, 2.0):
        scheduler.step(*([loss] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))
    state = scheduler.state_dict()
    assert same(state, through_json(state))
    scheduler.load_state_dict(through_json(state))
    assert same(scheduler.state_dict(), state)


@pytest.mark.parametrize(
    ("value", "where", "what"),
    [
        ([Rule()], "it[0]", "Rule"),
        ({"m": torch.nn.Linear(1, 1)}, "it.m", "Linear"),
        (np.array([None]), "it", "of object"),
        (np.longdouble(1), "it", "longdouble"),
        ({"p": namedtuple("Pair", "a")(1)}, "it.p", "Pair"),
        (defaultdict(Rule), "it, its default factory", "Rule"),
        ({Rule(): 1}, "it, its key", "Rule"),
        ({"k": {torch.float32}}, "it.k, its key", "dtype"),
        (bytearray(b"x"), "it", "bytearray"),
    ],
)
def test_what_is_no_tree_is_named(value: Any, where: str, what: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        encode(value, lambda path, tensor: path, "it")
    assert str(caught.value).startswith(where) and what in str(caught.value)


@pytest.mark.parametrize("make", [lambda v: [v], lambda v: {1: v}, lambda v: {"a": v}], ids=["list", "pairs", "dict"])
def test_depth_is_bounded_and_what_is_within_comes_back(make: Any) -> None:
    value = 0
    for _ in range(MAX_DEPTH):
        value = make(value)
    assert through_json(value) == value
    with pytest.raises(CheckpointError, match="deeper"):
        encode([value], lambda path, tensor: path)


@pytest.mark.parametrize(
    "node",
    [
        {"$": "tuple"},
        {"$": "os.system", "v": "true"},
        {"$": "defaultdict", "v": [], "of": "eval"},
        {"$": "dtype", "v": "load"},
        {"$": "numpy", "v": 1, "dtype": "object"},
        {"$": "ndarray", "v": "x", "dtype": "float64"},
        {"$": "tensor", "v": "none"},
    ],
    ids=repr,
)
def test_nothing_is_looked_up_by_a_name_in_a_file(node: Any) -> None:
    with pytest.raises((LookupError, TypeError, ValueError)):
        decode([node], {"x": torch.ones(2)}.__getitem__)
