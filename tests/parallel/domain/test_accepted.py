"""Which modules are taken, and what is said of the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fsshard.errors import ModelError
from fsshard.parallel.domain.accepted import check_operator
from tests.parallel.domain.operators import TWO, operator

pytest.importorskip("neuralop")


class Near(nn.Module):
    """Reads its neighbours."""


def sequential(*added: nn.Module) -> nn.Module:
    return nn.Sequential(operator(TWO), *added)


def uno() -> nn.Module:
    from neuralop.models import UNO

    more = {"uno_n_modes": [[4, 4]] * 2, "uno_scalings": [[1.0, 1.0]] * 2, "channel_mlp_skip": "linear"}
    return UNO(1, 1, 4, uno_out_channels=[4, 4], n_layers=2, **more)


REFUSED: dict[str, tuple[Any, str]] = {
    "batch_norm": (lambda: operator({**TWO, "norm": "batch_norm"}), "'fno_blocks.norm.0', BatchNorm, is not known to"),
    "half": (lambda: operator({**TWO, "fno_block_precision": "half"}), "fno_block_precision='half'; only 'full'"),
    "softmax": (lambda: operator({**TWO, "non_linearity": torch.softmax}), "non_linearity=softmax, not known to be"),
    "UNO": (uno, "'(the model)', UNO, is not known to treat every point"),
    "kernel": (lambda: sequential(nn.Conv2d(1, 1, 3, padding=1)), "'1', Conv2d, reads neighbouring points"),
    "unknown": (lambda: sequential(Near()), "'1', Near, is not known to treat every point by itself; if it does, pass"),
    "no operator": (lambda: nn.Sequential(nn.GELU()), "no spectral convolution"),
    "padded and scaled": (
        lambda: operator({**TWO, "n_layers": 1, "domain_padding": 0.1, "resolution_scaling_factor": 2}),
        "DomainPadding, pads a field whose resolution is scaled",
    ),
    "three of three": (lambda: operator(TWO), "2 spatial dimension(s), of which 2 cannot be split"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    make, text = REFUSED[name]
    with pytest.raises(ModelError) as caught:
        check_operator(make(), 2 if name == "three of three" else 1, ())
    assert text in str(caught.value)


def test_taken() -> None:
    check_operator(operator({**TWO, "norm": "group_norm"}), 1, ())
    check_operator(sequential(nn.Conv2d(1, 1, 1), nn.GELU(), Near()), 1, (Near,))
    check_operator(operator({**TWO, "non_linearity": torch.softmax}), 1, (torch.softmax,))
