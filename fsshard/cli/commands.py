"""The commands of ``fsshard`` but for ``parity`` and ``doctor``: options, and one call of the library each."""

from __future__ import annotations

import importlib.util
import math
import os
import sys
from contextlib import redirect_stdout
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Context, Exit, Option

from fsshard.cli import options, output
from fsshard.cli.options import DEFAULT_BACKENDS, Json, Progress, Quiet
from fsshard.errors import ConfigurationError, MissingExtra

SWEEP = tuple(4**power for power in range(7))
"""World sizes of an estimate's picture."""

Recipe = Annotated[
    str,
    Argument(
        metavar="RECIPE",
        help="A built-in recipe such as tfno, or module:attribute, importable from the current folder.",
    ),
]
MixedPrecision = Annotated[str | None, Option(help="fp32, bf16 or fp16; the recipe's by default.")]
Backends = Annotated[str, Option(help="Comma-separated backends.")]
Target = Annotated[str, Option(help="Device to estimate for: cpu or cuda.")]
Machine = Annotated[
    str | None,
    Option(
        metavar="NAME_OR_FILE",
        help="Machine whose constants predict the time: cpu, a100, h100, h200, or a file that fsshard doctor --measure "
        "wrote; h100 for cuda by default, else cpu.",
    ),
]
Real = Annotated[bool, Option("--real", help="Run on real tensors, as one rank, instead of simulating.")]


def top(
    context: Context,
    version: Annotated[bool, Option("--version", help="Print the version.")] = False,  # app.main() does
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise Exit(output.BAD_INPUT)


# ------------------------------------------------------------------------------------------------ checkpoints


def inspect(
    checkpoint: Annotated[Path, Argument(metavar="CHECKPOINT", help="A checkpoint, or a directory of checkpoints.")],
    verify: Annotated[bool, Option("--verify", help="Compare checksums too, which reads every byte.")] = False,
    json_file: Json = None,
    progress: Progress = None,
) -> None:
    """Print what CHECKPOINT contains, where it comes from, and whether it is complete.

    Exit code: 0 if it is complete; 1 if not, and the output names the damaged files and their tensors.
    """
    from fsshard.checkpoint.inspecting import inspect as inspected

    options.check_files(json_file)
    with output.progress_bar(progress if verify else False, sys.stderr) as bar:
        callback = bar("checksums")
        inspection = inspected(checkpoint, verify=verify, progress=lambda done, of: callback(done, of, ""))
    output.write_files(inspection, json_file)
    print("\n".join(inspection.render()), file=output.text_stream(json_file))
    raise Exit(output.exit_code(inspection.ok))


def export(
    checkpoint: Annotated[Path, Argument(metavar="CHECKPOINT", help="A checkpoint.")],
    file: Annotated[Path, Argument(metavar="FILE", help="File to write; a directory for hf and dcp.")],
    format: Annotated[
        str | None, Option(help="safetensors, torch, dcp or hf; by default from the suffix of FILE.")
    ] = None,
    optimizer: Annotated[bool, Option("--optimizer", help="Write the optimizer's state, too (torch and dcp).")] = False,
    model: Annotated[str | None, Option(help="Model to write, if the checkpoint has several.")] = None,
    max_shard_bytes: Annotated[
        int, Option(min=1, help="Split larger models into several safetensors files.")
    ] = 5_000_000_000,
    config: Annotated[Path | None, Option(help="A config.json, for hf.")] = None,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace existing files.")] = False,
) -> None:
    """Export the weights of CHECKPOINT to FILE, unsharded and under their original names, for other programs."""
    from fsshard.checkpoint.interop.exporting import export as write

    paths = write(
        checkpoint,
        file,
        format,
        optimizer=optimizer,
        model=model,
        max_shard_bytes=max_shard_bytes,
        config=config,
        overwrite=overwrite,
    )
    for path in paths:
        print(path)


def import_(
    source: Annotated[
        Path,
        Argument(
            metavar="SOURCE",
            help="A safetensors or .pt file, or a Hugging Face, DCP, DeepSpeed or neuraloperator directory.",
        ),
    ],
    destination: Annotated[Path, Argument(metavar="DESTINATION", help="Checkpoint to write.")],
    trust_pickle: Annotated[
        bool,
        Option("--trust-pickle", help="Unpickle SOURCE, which runs the code in it: only if you trust its author."),
    ] = False,
    optimizer: Annotated[bool, Option(help="Import optimizer states, too.")] = True,
    key: Annotated[str | None, Option(help="Name of the state dict to take, if SOURCE has several.")] = None,
) -> None:
    """Convert another program's checkpoint SOURCE into one of fsshard at DESTINATION."""
    from fsshard.checkpoint.interop.importing import import_checkpoint

    print(import_checkpoint(source, destination, trust_pickle=trust_pickle, optimizer=optimizer, key=key))


# ------------------------------------------------------------------------------------------------ what it costs


def estimate(
    recipe: Recipe,
    backends: Backends = DEFAULT_BACKENDS,
    world_size: Annotated[list[str] | None, Option(help="Comma-separated numbers of ranks.", show_default="2")] = None,
    mesh: Annotated[
        str | None,
        Option(metavar="NAME=SIZE,...", help="Split the model with the recipe's split(), for example data=4,tp=2."),
    ] = None,
    device: Target = "cpu",
    machine: Machine = None,
    mixed_precision: MixedPrecision = None,
    activation_checkpointing: Annotated[
        bool, Option("--activation-checkpointing", help="Recompute blocks in the backward pass.")
    ] = False,
    accumulation: Annotated[
        int | None, Option(min=1, help="Backward passes per step; the recipe's by default.")
    ] = None,
    cpu_offload: Annotated[
        bool, Option("--cpu-offload", help="Keep shards in host memory, and count only what stays on the device.")
    ] = False,
    average: Annotated[bool, Option("--average", help="Count an average of the weights, too (fsshard.EMA).")] = False,
    real: Real = False,
    json_file: Json = None,
    picture: Annotated[
        str | None,
        Option(
            "--plot", metavar="FILE", help="Plot the estimates and a sweep from 1 to 4096 ranks: .png, .svg or .pdf."
        ),
    ] = None,
    progress: Progress = None,
    quiet: Quiet = False,
) -> None:
    """Estimate the memory, traffic and time that a training step of RECIPE needs per rank, without a GPU.

    Exit code: 0; 2 for invalid input, including a step that depends on the values of tensors.
    """
    options.check_recipe(recipe)
    arguments: dict[str, Any] = {
        "device": device,
        "machine": machine,
        "real": real,
        "cpu_offload": cpu_offload,
        "average": average,
        "accumulation": accumulation,
        "backend": options.backend_names(backends),
        "mixed_precision": mixed_precision or ...,
        "activation_checkpointing": activation_checkpointing or ...,
    }
    sizes = options.world_sizes(world_size or ["2"])
    if mesh is not None:
        if picture is not None:
            raise ConfigurationError(
                "--plot shows 1 to 4096 data-parallel ranks, and --mesh is one mesh; leave out one of them"
            )
        (arguments["mesh"],) = options.meshes([mesh])
        if not world_size:
            sizes = [math.prod(arguments["mesh"].values())]
    options.check_files(json_file, picture)
    from fsshard.simulation import estimating
    from fsshard.simulation.result import overview, plot

    # The picture has a curve over numbers of ranks.
    sweep = SWEEP if picture is not None else ()
    every = list(dict.fromkeys([*sizes, *sweep]))
    with output.progress_bar(False if quiet else progress, sys.stderr) as bar:
        callback = bar(recipe)
        # What the recipe prints must not get into the JSON.
        with redirect_stdout(sys.stderr):
            ranks = every[0] if len(every) == 1 else every
            estimates = estimating.estimate(
                recipe, world_size=ranks, progress=lambda done, of: callback(done, of, "simulated"), **arguments
            )
    # The sweep is for the picture alone.
    printed = [one for one in estimates if one.world_size in sizes]
    out = output.text_stream(json_file)
    if not quiet:
        print("\n\n".join(map(str, printed)), end="\n\n", file=out)
    print(overview(printed), file=out)
    if json_file is not None:
        texts = [one.to_json() for one in printed]
        output.write_json(json_file, f"[{','.join(texts)}]")
    if picture is not None:
        plot(estimates, picture, sizes[0])


def tune(
    recipe: Recipe,
    world_size: Annotated[int, Option(min=1, help="Number of ranks.")] = 2,
    memory: Annotated[
        str | None,
        Option(help="Memory per rank, such as 40GiB; without it the plan with the smallest peak wins."),
    ] = None,
    backends: Backends = "fsdp2",
    meshes: Annotated[
        str | None,
        Option(
            metavar="NAME,...",
            help="Dimensions over which the ranks are arranged in all sizes and orders, such as replicate,shard.",
        ),
    ] = None,
    device: Target = "cpu",
    machine: Machine = None,
    mixed_precision: MixedPrecision = None,
    limit: Annotated[
        int | None,
        Option(min=1, help="Maximum number of simulations.", show_default="12 to 40"),
    ] = None,
    real: Real = False,
    json_file: Json = None,
    picture: Annotated[
        str | None,
        Option("--plot", metavar="FILE", help="Plot peak memory against time and traffic: .png, .svg or .pdf."),
    ] = None,
    progress: Progress = None,
) -> None:
    """Find the fastest sharding plan for RECIPE that fits into memory, by simulation.

    Prints the Pareto frontier, and the best plan as code to paste. Exit code: 0; 2 for invalid input, including a
    memory limit that no plan fits.
    """
    options.check_recipe(recipe)
    arguments: dict[str, Any] = {
        "memory": memory,
        "device": device,
        "machine": machine,
        "real": real,
        "limit": limit,
        "meshes": None if meshes is None else options.names(meshes),
        "mixed_precision": mixed_precision or ...,
        "backend": options.backend_names(backends),
    }
    options.check_files(json_file, picture)
    from fsshard.simulation.tuning import tuning

    with output.progress_bar(progress, sys.stderr) as bar:
        callback = bar(recipe)

        def tell(done: int, text: str) -> None:
            callback(done, limit or done + 1, text)

        # What the recipe prints must not get into the JSON.
        with redirect_stdout(sys.stderr):
            result = tuning.tune(recipe, world_size=world_size, progress=tell, **arguments)
    print(result, file=output.text_stream(json_file))
    output.write_files(result, json_file, picture)


# ------------------------------------------------------------------------------------------------ the demo


Trainer = Enum("Trainer", {"plain": "plain", "neuralop": "neuralop"})
Data = Enum("Data", {"solved": "solved", "official": "official"})


def demo(
    context: Context,
    backends: Annotated[str, Option("--backends", "--backend", help="Comma-separated backends.")] = "fsdp2",
    world_size: Annotated[
        int, Option("--world-size", "--nprocs", min=1, help="Number of ranks to start; ignored under torchrun.")
    ] = 2,
    trainer: Annotated[
        Trainer, Option(help="Train in a plain loop, or with neuraloperator's Trainer.")
    ] = Trainer.plain,
    epochs: Annotated[int, Option(min=1, help="Passes over the training samples.")] = 20,
    batch_size: Annotated[int, Option(min=1, help="Samples per batch, over all ranks.")] = 32,
    clip: Annotated[float, Option(min=0.0, help="Maximum gradient norm (plain loop only).")] = 1.0,
    n_train: Annotated[int, Option(min=1, help="Samples to train on.")] = 1000,
    n_test: Annotated[int, Option(min=1, help="Samples to test on.")] = 50,
    data: Annotated[
        Data, Option(help="Solve the equation here, or let pip fetch neuraloperator's files once (4 MB).")
    ] = Data.solved,
    data_dir: Annotated[
        Path | None, Option(help="Read neuraloperator's darcy_*.pt from this folder, instead of --data.")
    ] = None,
    save_dir: Annotated[Path | None, Option(help="Folder for checkpoints (--trainer neuralop only).")] = None,
    picture: Annotated[
        str | None,
        Option("--plot", "--picture", metavar="FILE", help="Plot inputs, truth and predictions: .png, .svg or .pdf."),
    ] = None,
    timeout: Annotated[float, Option(min=1.0, help="Time limit of a collective, in seconds.")] = 60.0,
) -> None:
    """Train a Tucker-factorised TFNO (complex64 weights) on Darcy flow, under one backend or several.

    Prints the largest difference between their losses. The data is computed once and cached.
    """
    names = options.backend_names(backends)
    for module, package in {"scipy": "scipy", "neuralop": "neuraloperator"}.items():
        if importlib.util.find_spec(module) is None:
            raise MissingExtra(package, "examples", "the demo")
    # torchrun says how many ranks there are.
    world_size = int(os.environ.get("WORLD_SIZE", world_size))
    if batch_size % world_size:
        raise ConfigurationError(f"--batch-size {batch_size} must be a multiple of --world-size {world_size}")
    if save_dir is not None and trainer is not Trainer.neuralop:
        raise ConfigurationError("--save-dir needs --trainer neuralop; the plain loop saves nothing")
    options.check_files(None, picture)
    options.check_folders(data_dir, None if save_dir is None else save_dir.absolute().parent)
    from fsshard.demo.tfno_darcy import Demo, run

    settings = {
        **context.params,
        "backends": names,
        "world_size": world_size,
        "trainer": trainer.value,
        "data": data.value,
    }
    run(Demo(**settings))
