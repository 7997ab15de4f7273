"""FSDP2: what the backend shields from, shown in raw torch.

Tests fsshard/backends/torch_sharded.py too.
"""

from __future__ import annotations

import warnings
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsshard
from fsshard.backends.whole import gather_grads
from fsshard.planning.policies import Precision
from tests.models import net
from tests.on_ranks import on_ranks
from tests.training_runs import differences


def job_raw(what: str) -> str:
    from torch.distributed.fsdp import fully_shard

    try:
        if what == "complex":
            model = fully_shard(net())
            model(torch.ones(2, 4))
        elif what == "tied":
            first, second = nn.Linear(4, 4), nn.Linear(4, 4)
            second.weight = first.weight
            fully_shard(first)
            fully_shard(second)
            fully_shard(nn.Sequential(first, second))(torch.ones(2, 4))
        elif what == "scalar":
            module = nn.Linear(4, 4)
            module.scale = nn.Parameter(torch.tensor(1.0))
            fully_shard(module)
        else:
            module = nn.Linear(4, 6)
            module.weight = nn.Parameter(torch.randn(4, 6).t())
            fully_shard(module)
    except (AssertionError, ValueError, NotImplementedError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("complex", "uniform original parameter dtype"),
        ("tied", "shared"),
        ("scalar", "scalar"),
        ("layout", "contiguous"),
    ],
)
def test_what_raw_fsdp2_refuses(ranks: Any, what: str, text: str) -> None:
    assert text in ranks.run(job_raw, 2, what)[0]


class Spectral(nn.Module):
    """A unit of complex weights only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(x.to(torch.complex64) @ self.weight).square().sum()


def job_complex_alone(how: str) -> tuple[str, list[str]]:
    """Return what was raised or warned of, and which gradients are not those of the bare module."""
    bare, unit, x = Spectral(), Spectral(), torch.ones(2, 4)
    bare(x).backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if how == "ours":
            model = fsshard.wrap(unit, backend="fsdp2", mixed_precision=Precision(reduce=torch.float32))
            model(x).backward()
            found = {entry.name: torch.view_as_complex(pairs) for entry, pairs in gather_grads(model.backend)}
        else:
            from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

            raw = fully_shard(unit, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
            try:
                raw(x).backward()
            except TypeError as error:
                return str(error), []
            found = {"weight": raw.weight.grad.full_tensor()}
    told = " ".join(str(warning.message) for warning in caught if "imaginary" in str(warning.message))
    assert found["weight"].real.equal(bare.weight.grad.real)
    return told, list(differences({"weight": bare.weight.grad}, found))


def test_a_unit_of_complex_weights_keeps_the_imaginary_part_of_its_gradient(ranks: Any) -> None:
    assert ranks.run(job_complex_alone, 2, "ours") == [("", []), ("", [])]
    told, wrong = ranks.run(job_complex_alone, 2, "raw")[0]
    if wrong:
        assert "discards the imaginary part" in told
    else:  # before it was an error, which nobody overlooks
        assert "can't be cast to the desired output type Float" in told
        pytest.skip(f"raw FSDP2 of torch {torch.__version__} raises: {told}")


def job_dtype_on_the_way() -> tuple[bool, bool]:
    """Return whether raw FSDP2, told ``param_dtype`` only, rounds its gradient to bfloat16; and whether ours does."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    x = torch.linspace(-1, 1, 12).view(3, 4) * (dist.get_rank() + 1.3)
    raw = fully_shard(Linear(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    raw(x).float().square().sum().backward()
    ours = fsshard.wrap(Linear(), backend="fsdp2", mixed_precision=Precision(param=torch.bfloat16))
    ours(x).float().square().sum().backward()
    (gradient,) = (gradient for entry, gradient in gather_grads(ours.backend) if entry.name == "weight")
    return _is_narrow(raw.weight.grad.full_tensor()), _is_narrow(gradient)


class Linear(nn.Linear):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(4, 4)


def _is_narrow(tensor: Tensor) -> bool:
    return tensor.equal(tensor.to(torch.bfloat16).to(tensor.dtype))


def test_gradients_are_reduced_in_the_dtype_of_computation(ranks: Any) -> None:
    """As under every other backend; raw FSDP2 does it up to torch 2.14, and in float32 from 2.15 on."""
    outcomes = ranks.run(job_dtype_on_the_way, 2)
    assert all(ours for _, ours in outcomes)
    if all(raw for raw, _ in outcomes):
        pytest.skip(f"raw FSDP2 of torch {torch.__version__} reduces in param_dtype, too")


class Tempered(nn.Module):
    """CLIP's ``logit_scale``: a 0-dim parameter, which its users clamp between steps."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.logit_scale = nn.Linear(4, 4), nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.layer(x)) * self.logit_scale.exp()


@on_ranks()
def test_a_scalar_parameter_can_be_read_outside_of_the_forward() -> None:
    """DTensor's reshape said "would remove or reshape sharded dimension 0", even where only the shape was asked for."""
    model = fsshard.wrap(Tempered(), backend="fsdp2")
    inner = cast(Any, model.module)
    seen = [inner.logit_scale.dtype, inner.logit_scale.requires_grad, tuple(inner.logit_scale.shape)]
    if dist.get_rank() == 0:
        str(inner.logit_scale)  # no communication
    inner.logit_scale.data.clamp_(max=1.5)
    with pytest.raises(fsshard.FsshardError, match=r"full_parameters\(\)"):
        float(inner.logit_scale.exp())
    with model.full_parameters():
        seen.append(inner.logit_scale.item())
    assert [*seen, model.state_dict()["logit_scale"].item()] == [torch.float32, True, (1,), 1.5, 1.5]
