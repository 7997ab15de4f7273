"""Checkpoints of the real FairScale under every backend of ours, and ours under the real FairScale.

Tests compat/fairscale_shards.py too.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

pytest.importorskip("fairscale")

from fsshard.compat.fairscale_checkpoints import join_model_shards
from fsshard.errors import ConfigurationError, StateDictError
from tests.compat.old_checkpoints import (
    SETTINGS,
    Text,
    Waves,
    job_back_to_fsdp,
    job_back_to_oss,
    job_front,
    job_named,
    job_names,
    job_not_strict,
    job_resume_aged,
    job_resume_fsdp,
    job_resume_oss,
    job_resume_plain,
    job_spoilt,
    job_write_fsdp,
    job_write_oss,
)
from tests.training_runs import DISTRIBUTED, differences

# ------------------------------------------------------------------------------------------------ OSS, ShardedDDP


@pytest.fixture(scope="module", params=list(SETTINGS))
def text(request: pytest.FixtureRequest, ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A checkpoint of a training by the real OSS with two groups: setting, folder, the weights had it gone on."""
    folder = str(tmp_path_factory.mktemp("oss"))
    return request.param, folder, ranks.run(job_write_oss, 2, Text, request.param, folder)[0]


@pytest.mark.covering
@pytest.mark.parametrize("backend", DISTRIBUTED)
def test_oss_goes_on(ranks: Any, text: Any, backend: str) -> None:
    setting, folder, expected = text
    for weights in ranks.run(job_resume_oss, 2, Text, setting, folder, backend):
        assert list(differences(expected, weights)) == []


@pytest.mark.parametrize("backend", [*DISTRIBUTED, "none"])
def test_oss_goes_on_at_one_rank(ranks: Any, text: Any, backend: str) -> None:
    setting, folder, _ = text
    expected = ranks.run(job_resume_plain, 1, Text, setting, folder)
    assert list(differences(expected, ranks.run(job_resume_oss, 1, Text, setting, folder, backend))) == []


@pytest.mark.covering
@pytest.mark.parametrize("backend", DISTRIBUTED)
def test_a_state_of_an_older_torch_goes_on(ranks: Any, text: Any, backend: str) -> None:
    setting, folder, expected = text
    assert list(differences(expected, ranks.run(job_resume_aged, 2, setting, folder, backend)[0])) == []


@pytest.mark.parametrize("setting", ["AdamW", "SGD"])
def test_one_oss_per_dtype_goes_on_as_one_optimizer(ranks: Any, tmp_path: Any, setting: str) -> None:
    """Complex weights: the real library needs an OSS of their own for them."""
    expected = ranks.run(job_write_oss, 2, Waves, setting, str(tmp_path))[0]
    alone = ranks.run(job_resume_plain, 1, Waves, setting, str(tmp_path))[0]
    for backend in DISTRIBUTED:
        for weights in ranks.run(job_resume_oss, 2, Waves, setting, str(tmp_path), backend):
            assert list(differences(expected, weights)) == []
    for backend in (*DISTRIBUTED, "none"):
        assert list(differences(alone, ranks.run(job_resume_oss, 1, Waves, setting, str(tmp_path), backend)[0])) == []


@pytest.mark.covering
@pytest.mark.parametrize(("setting", "backend"), [*itertools.product(SETTINGS, DISTRIBUTED)])
def test_back_to_oss_and_to_torch(ranks: Any, setting: str, backend: str) -> None:
    for here, real, alone in ranks.run(job_back_to_oss, 2, Text, setting, backend):
        assert list(differences(here, real)) == []
        assert list(differences(here, alone)) == []


def test_oss_goes_on_under_the_front(ranks: Any, text: Any) -> None:
    """The same script, on our OSS and ShardedDataParallel; and back under the real ones."""
    setting, folder, expected = text
    for here, real in ranks.run(job_front, 2, Text, setting, folder):
        assert list(differences(expected, here)) == []
        assert list(differences(expected, real)) == []


# ------------------------------------------------------------------------------------------------ FSDP


@pytest.fixture(scope="module", params=["AdamW", "SGD"])
def nested(request: pytest.FixtureRequest, ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A checkpoint of the real FSDP: setting, folder, the weights had it gone on."""
    folder = str(tmp_path_factory.mktemp("fsdp"))
    return request.param, folder, ranks.run(job_write_fsdp, 2, request.param, folder, ("block",))[0]


@pytest.mark.covering
@pytest.mark.parametrize("form", ["metadata", "units", "shards"])
@pytest.mark.parametrize("backend", DISTRIBUTED)
def test_fsdp_goes_on(ranks: Any, nested: Any, backend: str, form: str) -> None:
    setting, folder, expected = nested
    assert list(differences(expected, ranks.run(job_resume_fsdp, 2, setting, folder, backend, form)[0])) == []


@pytest.mark.parametrize("backend", DISTRIBUTED)
def test_fsdp_of_the_whole_model_alone(ranks: Any, tmp_path: Any, backend: str) -> None:
    """One flat parameter is in the model's order, so that nothing needs to be said."""
    expected = ranks.run(job_write_fsdp, 2, "AdamW", str(tmp_path), ())[0]
    found = ranks.run(job_resume_fsdp, 2, "AdamW", str(tmp_path), backend, "alone")[0]
    assert list(differences(expected, found)) == []


@pytest.mark.covering
@pytest.mark.parametrize(("setting", "units"), [*itertools.product(["AdamW", "SGD", "NAdam"], [(), ("block",)])])
def test_back_to_fsdp(ranks: Any, setting: str, units: tuple[str, ...]) -> None:
    for backend in DISTRIBUTED:
        for here, real in ranks.run(job_back_to_fsdp, 2, setting, backend, units):
            assert list(differences(here, real)) == []


# ------------------------------------------------------------------------------------------------ both, and forms


def test_names_that_the_state_itself_has(ranks: Any) -> None:
    expected, found = ranks.run(job_named, 2)[0]
    assert list(differences(expected, found)) == []


# ------------------------------------------------------------------------------------------------ what does not fit


SPOILT = {
    "none": ["a NoneType", "on every rank"],
    "partial": ["missing: state of hidden.bias", "strict=False"],
    "gone": ["missing: state of hidden.bias"],
    "fewer": ["missing: embed.weight (8, 6)"],
    "shape": ["hidden.bias: exp_avg: expected (6,), got (7,)"],
    "groups": ["number of param_groups: expected 2, got 1"],
    "uncollected": ["rank 0's part only"],
}


@pytest.mark.parametrize("only_rank", [None, 1])
def test_a_state_that_does_not_fit(ranks: Any, only_rank: int | None) -> None:
    """Said on every rank, the one with a good file too, before anything is changed."""
    for rank, found in enumerate(ranks.run(job_spoilt, 2, only_rank)):
        assert list(found) == list(SPOILT)
        for how, (said, changed) in found.items():
            assert said.startswith("StateDictError: ") and all(text in said for text in SPOILT[how]), said
            assert only_rank in (None, rank) or f"rank {only_rank}:" in said
            assert changed == []


def test_a_parameter_without_state_starts_anew_if_one_says_so(ranks: Any) -> None:
    for with_state, every in ranks.run(job_not_strict, 2):
        assert set(every) - set(with_state) == {"frozen", "hidden.bias"}


def test_names_that_do_not_go_with_the_state(ranks: Any) -> None:
    texts = {
        "needed": ("ConfigurationError: ", "fsdp_names(model, units)"),
        "other units": ("StateDictError: ", "parameters of each wrapped module: expected [2, 4, 2], got [4, 4]"),
        "unknown module": ("ConfigurationError: ", "no module 'blok'"),
        "shared": ("ConfigurationError: ", "'embed.weight' is shared by modules of different units"),
        "left out": ("StateDictError: ", "missing: last.bias"),
    }
    for told in ranks.run(job_names, 2):
        for case, (kind, text) in texts.items():
            assert told[case].startswith(kind) and text in told[case], told[case]


def metadata(padding: int = 0, **changes: Any) -> dict[str, Any]:
    """As local_metadata_dict() of a rank with one linear layer."""
    flat = {"names": ["weight", "bias"], "shapes": [(2, 2), (2,)], "numels": [4, 2], "padding": padding}
    module = {"fsdp_path": "", "params": {"flat_param_0": flat}, "no_broadcast_optim_state": False, **changes}
    return {"param_metadata": [{**module, "shared_param_info": []}], "buffer_names": []}


def test_shards_that_do_not_add_up() -> None:
    shards = [{"flat_param_0": torch.zeros(3)}, {"flat_param_0": torch.zeros(3)}]
    assert set(join_model_shards(shards, [metadata(), metadata()])) == {"weight", "bias"}
    with pytest.raises(StateDictError, match="flat_param_0: expected 6, got 5"):
        join_model_shards(shards, [metadata(), metadata(padding=1)])
    with pytest.raises(StateDictError, match="missing: flat_param_0 of rank 1"):
        join_model_shards([shards[0], {}], [metadata(), metadata()])
    with pytest.raises(ConfigurationError, match="2 shards with 1 metadata"):
        join_model_shards(shards, [metadata()])
    with pytest.raises(ConfigurationError, match="no_broadcast_optim_state=True"):
        join_model_shards(shards, [metadata(no_broadcast_optim_state=True)] * 2)
    with pytest.raises(ConfigurationError, match="local_metadata_dict"):
        join_model_shards(shards, [{}, {}])
