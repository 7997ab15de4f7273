"""Names of dtypes: each stands for one, and a file's reader agrees with what is written."""

from __future__ import annotations

import pytest
import torch

from fsshard.checkpoint.format.dtypes import BY_FILE_NAME, BY_NAME, STORED, dtype_name


def test_names_lead_back_to_their_dtypes() -> None:
    assert {dtype_name(dtype): dtype for dtype in STORED} == dict(BY_NAME)
    assert BY_NAME["complex64"] is torch.complex64 and dtype_name(torch.bfloat16) == "bfloat16"


@pytest.mark.parametrize("dtype", list(STORED), ids=str)
def test_what_the_header_names_has_the_bytes_of_an_element(dtype: torch.dtype) -> None:
    stored = STORED[dtype]
    assert BY_FILE_NAME[stored.name] is stored.dtype and stored.dtype.itemsize * stored.lanes == dtype.itemsize
    assert stored.lanes == (2 if dtype in (torch.complex32, torch.complex128) else 1)
