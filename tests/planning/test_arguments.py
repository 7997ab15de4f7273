"""Checks that what editors and type checkers are told of wrap's arguments is what wrap takes."""

from __future__ import annotations

import inspect

import fsshard
from fsshard.backends.registry import loaded_backends
from fsshard.planning.arguments import EngineOptions, WrapSettings
from fsshard.planning.torch_settings import _ONLY, IGNORED, RENAMED

TORCHS = ("device_id", "device_ids", "output_device", "process_group", "offload_policy")


def test_each_argument_of_wrap_has_a_type() -> None:
    keywords = [p for p in inspect.signature(fsshard.wrap).parameters.values() if p.kind is p.KEYWORD_ONLY]
    assert len(keywords) > 10 and not {"object", "Any"} & {p.annotation for p in keywords}
    assert set(WrapSettings.__annotations__) - set(EngineOptions.__annotations__) == {p.name for p in keywords}


def test_each_option_of_an_engine_has_a_type() -> None:
    options = {name for engine in loaded_backends() for name in engine.facts.option_names}
    assert set(EngineOptions.__annotations__) == {*options, *TORCHS, *RENAMED, *IGNORED, *_ONLY} - {"ignored_states"}
