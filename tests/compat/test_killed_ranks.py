"""A rank that is killed within Lightning's Trainer, Hugging Face's or Accelerate's loop: the others say so, and end."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")
pytest.importorskip("lightning.pytorch")
pytest.importorskip("transformers")

from fsshard import Context, launch
from fsshard.errors import RankFailed
from tests.compat.accelerate import trainings as accelerates
from tests.compat.lightning import trainings as lightnings
from tests.compat.transformers import trainings as theirs
from tests.forked import forking


class Deadly(lightnings.Module):
    """Rank 1 is killed in its third step."""

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        die_if(number == 2)
        return super().training_step(batch, number)


class DeadlyTrainer(theirs.Trainer):
    """Likewise."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        die_if(self.state.global_step == 2)
        return super().compute_loss(*args, **kwargs)


def die_if(due: bool) -> None:
    if due and torch.distributed.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def by_lightning(folder: str) -> None:
    lightnings.trainer_of(lightnings.strategy_of("fsdp2"), 1).fit(Deadly(), lightnings.loader())


def by_hugging_face(folder: str) -> None:
    made = theirs.trainer_of("hf", folder, theirs.t5(), eval_strategy="no")
    DeadlyTrainer(theirs.t5(), made.args, train_dataset=theirs.samples(), fsshard={"backend": "fsdp2"}).train()


def by_accelerate(folder: str) -> None:
    accelerator = accelerates.accelerator_of("fsdp2")
    model, optimizer, loader, _ = accelerates.prepared(accelerator, "at once", torch.float32)
    for number, (x, y) in enumerate(loader):
        die_if(number == 2)
        accelerator.backward((model(x) - y).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def told(ctx: Context, train: Any, folder: str) -> None:
    """Train, and leave what was raised in a file."""
    try:
        train(folder)
    except BaseException as error:
        Path(folder, f"rank{ctx.rank}").write_text(f"{type(error).__name__}: {error}")
        raise


@pytest.fixture(autouse=True)
def _forked() -> Iterator[None]:
    with forking():
        yield


@pytest.mark.long
@pytest.mark.parametrize("train", [by_lightning, by_hugging_face, by_accelerate])
def test_the_others_name_the_rank_that_was_killed(train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RankFailed, match="rank 1 failed with SIGKILL"):
        launch(told, 2, (train, str(tmp_path)), backend="gloo", timeout=20)
    assert ": rank 1 has ended: its process is gone" in (tmp_path / "rank0").read_text()
