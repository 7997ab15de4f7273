"""A neural operator on Darcy flow with neuraloperator's own Trainer, on two ranks and under any engine.

    python tfno_trainer.py
    python tfno_trainer.py --backend fairscale --save-dir checkpoints
    torchrun --nproc-per-node 2 tfno_trainer.py

Against a script for one process three lines are new: ``wrap``, ``build_optimizer``, and the import of the Trainer.
With ``--save-dir`` there is a checkpoint that ``TFNO.from_checkpoint(folder, "model")`` reads on one process; run the
same command again, with more epochs, and it goes on from there.
"""

import argparse
import os

import torch
from neuralop import H1Loss, LpLoss
from neuralop.data.transforms.data_processors import DefaultDataProcessor
from neuralop.data.transforms.normalizers import UnitGaussianNormalizer
from neuralop.models import TFNO
from torch.utils.data import DataLoader, DistributedSampler

import fsshard
from fsshard.compat.neuralop import Trainer
from fsshard.demo import darcy


def train(ctx, args):
    """Runs on every rank, each in its own process."""
    data = darcy.load(n_train=args.n_train, n_test=args.n_test)
    normalizer = UnitGaussianNormalizer(dim=[0, 2, 3])
    normalizer.fit(data.train_y)

    torch.manual_seed(0)
    model = TFNO(n_modes=(16, 16), in_channels=1, out_channels=1, hidden_channels=32, projection_channel_ratio=2)
    model = fsshard.wrap(model.to(ctx.device), backend=args.backend)
    optimizer = fsshard.build_optimizer(model, torch.optim.Adam, lr=args.lr, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)

    samples = records(data.train_x, data.train_y)
    sampler = DistributedSampler(samples, ctx.world_size, ctx.rank)  # the Trainer tells it the epoch
    h1 = H1Loss(d=2, periodic_in_x=False, periodic_in_y=False)  # sums over the batch, as all losses of neuralop
    trainer = Trainer(
        model=model,
        n_epochs=args.epochs,
        device=ctx.device,
        data_processor=DefaultDataProcessor(out_normalizer=normalizer),
        verbose=True,  # rank 0 alone prints
    )
    there = args.save_dir is not None and os.path.exists(os.path.join(args.save_dir, "manifest.pt"))
    metrics = trainer.train(
        train_loader=DataLoader(samples, args.batch_size // ctx.world_size, sampler=sampler),
        test_loaders={size: DataLoader(records(x, y), 10) for size, (x, y) in data.tests.items()},
        optimizer=optimizer,
        scheduler=scheduler,
        training_loss=h1,
        eval_losses={"l2": LpLoss(d=2, p=2)},
        save_every=1 if args.save_dir else None,
        save_dir=args.save_dir or ".",
        resume_from_dir=args.save_dir if there else None,
    )
    errors = {size: float(metrics[f"{size}_l2"]) for size in data.tests}  # over all ranks
    memory = model.memory_report(all_ranks=True)
    if ctx.rank == 0:
        print(*(f"relative L2 error at {size} x {size}: {error:.1%}" for size, error in errors.items()), sep="\n")
        print(memory, flush=True)
    return errors


def records(x, y):
    """The dictionaries that neuraloperator's Trainer takes."""
    return [{"x": each, "y": other} for each, other in zip(x, y, strict=True)]


def parse(arguments=None):
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="fsdp2", help="fsdp2, fsdp, ddp, fairscale")
    parser.add_argument("--nprocs", type=int, default=os.environ.get("WORLD_SIZE") or torch.cuda.device_count() or 2)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=16, help="of all ranks together")
    parser.add_argument("--lr", type=float, default=8e-3)
    parser.add_argument("--n-train", type=int, default=200)
    parser.add_argument("--n-test", type=int, default=20)
    parser.add_argument("--save-dir", help="where a checkpoint goes after each epoch, and is gone on from")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    args = parse()
    darcy.load(n_train=args.n_train, n_test=args.n_test)  # solved here, so that the ranks find the data
    fsshard.launch(train, args.nprocs, (args,))
