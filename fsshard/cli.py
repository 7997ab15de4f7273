"""The command ``fsshard``.

    fsshard parity examples.recipes:tfno --backends fairscale,fsdp,fsdp2,ddp --world-size 2

Exit codes: 0, all is well; 1, something differs, was refused or failed; 2, the question itself is wrong (no such
recipe, an unknown backend, a bad option, a missing package), told in one line; 130, interrupted; 143, terminated.

typer and rich come with the extra ``cli``; without them the command says so.
"""

# No `from __future__ import annotations`: typer reads the annotations of functions whose names are local.

import importlib
import json
import logging
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import fsshard
from fsshard.errors import ConfigurationError, CorruptCheckpoint, FsshardError, MissingExtra, RecipeError
from fsshard.text import printable

if TYPE_CHECKING:
    import typer

    from fsshard.parity import ParityReport
    from fsshard.parity.golden import GoldenResult

__all__ = ["application", "main"]

AGREED, DIFFERENT, BAD_INPUT, INTERRUPTED, TERMINATED = 0, 1, 2, 130, 143
DEFAULT_BACKENDS = "fairscale,fsdp,fsdp2,ddp"
DEFAULT_WORLD_SIZES = ("1", "2")
GOLDEN_BACKENDS = ("ddp", "fsdp2")
LOG_WIDTH = 1000
_LAYOUT = "\n\t"
NOT_FOR_GOLDEN = {"world_size": "--world-size", "steps": "--steps", "reference": "--reference", "device": "--device"}

Progress = Callable[[float, float, str], None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Args:
        arguments: without the program's name; those of the process by default.
    """
    try:
        given = list(sys.argv[1:] if arguments is None else arguments)
        with _termination_raises(), _printable_log():
            code = application()(args=given, prog_name="fsshard", standalone_mode=False)
        return code if isinstance(code, int) else AGREED
    except CorruptCheckpoint as error:
        _complain(error)
        return DIFFERENT
    except FsshardError as error:
        return _complain(error)
    except OSError as error:  # a file that cannot be written
        return _complain(error)
    except Exception as error:
        if not hasattr(error, "format_message"):
            if type(error).__name__ == "Abort":  # what typer makes of Ctrl-C
                return INTERRUPTED
            raise
        # typer's (or, before 0.25, click's) word for a bad option; their own output is a box of several lines.
        return _complain(error.format_message())


@contextmanager
def _termination_raises() -> Iterator[None]:
    """Make SIGTERM an exception, so that folders of temporary files go and ranks end as on any other way out."""
    before = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or before is None:  # None: not Python's to restore
        yield
        return

    def end(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not interrupt the clearing up
        raise SystemExit(TERMINATED)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _complain(error: object) -> int:
    print(f"fsshard: {printable(str(error), keep=_LAYOUT)}", file=sys.stderr)
    return BAD_INPUT


@contextmanager
def _printable_log() -> Iterator[None]:
    """What is logged can have names out of files, which a terminal must not obey."""

    def spell(record: logging.LogRecord) -> bool:
        record.msg, record.args = printable(record.getMessage(), keep=_LAYOUT), ()
        return True

    logger = logging.getLogger("fsshard")
    logger.addFilter(spell)
    try:
        yield
    finally:
        logger.removeFilter(spell)


def application() -> "typer.Typer":
    """The typer application.

    Raises:
        MissingExtra: typer or rich is not installed.
    """
    try:
        import rich  # noqa: F401
        import typer
    except ImportError as error:
        raise MissingExtra((error.name or "typer").partition(".")[0], "cli", "the command line") from error
    app = typer.Typer(
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        help="One interface over FairScale, FSDP, FSDP2 and DDP, and the proof that they train the same.",
    )
    _add_common(app)
    _add_parity(app)
    _add_inspect(app)
    _add_export(app)
    _add_import(app)
    _add_estimate(app)
    _add_tune(app)
    _add_doctor(app)
    return app


def _add_common(app: "typer.Typer") -> None:
    import typer

    def show_version(wanted: bool) -> None:
        if wanted:
            print(f"fsshard {fsshard.__version__}")
            raise typer.Exit(AGREED)

    @app.callback(invoke_without_command=True)
    def common(
        context: typer.Context,
        version: Annotated[
            bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version.")
        ] = False,
    ) -> None:
        if context.invoked_subcommand is None:
            print(context.get_help())
            raise typer.Exit(BAD_INPUT)


def _add_parity(app: "typer.Typer") -> None:
    import typer

    @app.command()
    def parity(
        context: typer.Context,
        recipes: Annotated[
            list[str] | None,
            typer.Argument(metavar="[RECIPE]...", help="module:attribute, importable from the current folder."),
        ] = None,
        backends: Annotated[
            str | None, typer.Option(help="Comma list of backends.", show_default=DEFAULT_BACKENDS)
        ] = None,
        world_size: Annotated[
            list[str] | None,
            typer.Option(help="Numbers of ranks: repeat it, or give a comma list.", show_default="1,2"),
        ] = None,
        steps: Annotated[int, typer.Option(min=1, help="Optimizer steps per run.")] = 10,
        reference: Annotated[
            str, typer.Option(help="What all are compared with: ddp, or none (one process, joined batches).")
        ] = "ddp",
        timeout: Annotated[float, typer.Option(min=1.0, help="Seconds that one run may take.")] = 120.0,
        device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
        json_file: Annotated[
            str | None, typer.Option("--json", metavar="FILE", help="Write the report as JSON; - is stdout.")
        ] = None,
        picture: Annotated[
            str | None, typer.Option("--plot", metavar="FILE", help="Draw the report: .png, .svg or .pdf.")
        ] = None,
        golden: Annotated[
            bool, typer.Option("--golden", help="Check the golden runs of this installation instead of a RECIPE.")
        ] = False,
        progress: Annotated[
            bool | None, typer.Option(help="A progress bar on stderr; by default if that is a terminal.")
        ] = None,
        quiet: Annotated[bool, typer.Option("--quiet", "-q", help="One line per recipe, and its warnings.")] = False,
    ) -> None:
        """Train RECIPE under several backends and compare them, step by step, to the last bit.

        The exit code is 0 only if all agree; 1 if something differs, failed or was refused; 2 for bad input.
        """
        request = _Request(
            recipes=list(dict.fromkeys(recipes or ())),
            backends=_names("--backends", backends),
            world_sizes=_sizes(world_size or DEFAULT_WORLD_SIZES),
            options={"steps": steps, "reference": reference, "timeout": timeout, "device": device},
            json_file=json_file,
            picture=picture,
            progress=False if quiet else progress,
            quiet=quiet,
            misplaced=[
                option
                for name, option in NOT_FOR_GOLDEN.items()
                if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
            ],
        )
        raise typer.Exit(_run_golden(request) if golden else _run_parity(request))


def _add_inspect(app: "typer.Typer") -> None:
    import typer

    @app.command()
    def inspect(
        checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, or a directory of them.")],
        verify: Annotated[bool, typer.Option("--verify", help="Compare checksums: reads every byte.")] = False,
        json_file: Annotated[
            str | None, typer.Option("--json", metavar="FILE", help="Write all of it as JSON; - is stdout.")
        ] = None,
        progress: Annotated[
            bool | None, typer.Option(help="A progress bar on stderr; by default if that is a terminal.")
        ] = None,
    ) -> None:
        """Print what CHECKPOINT holds, where it comes from, and whether it is whole.

        The exit code is 1 if it is not: the file and the tensors in it are named.
        """
        raise typer.Exit(_run_inspect(checkpoint, verify, json_file, progress))


def _run_inspect(path: Path, verify: bool, json_file: str | None, progress: bool | None) -> int:
    from rich.console import Console

    from fsshard.checkpoint.inspecting import inspect
    from fsshard.parity.render import check_file

    if json_file not in (None, "-"):
        check_file(str(json_file))
    with _progress_bar(progress if verify else False, sys.stderr) as bar:
        shown = bar("checksums")
        found = inspect(path, verify=verify, progress=None if shown is None else lambda done, of: shown(done, of, ""))
    if json_file is not None:
        _write_json(json_file, found.to_json())
    out = sys.stderr if json_file == "-" else sys.stdout
    console = Console(file=out, emoji=False)
    if not console.is_terminal:  # a log: no lines that are cut at 80 columns
        console = Console(file=out, width=LOG_WIDTH, emoji=False)
    for part in found.render():
        console.print(part, markup=False, highlight=False, soft_wrap=isinstance(part, str))
    return AGREED if found.ok else DIFFERENT


def _add_export(app: "typer.Typer") -> None:
    import typer

    @app.command()
    def export(
        checkpoint: Annotated[Path, typer.Argument(help="A checkpoint.")],
        file: Annotated[Path, typer.Argument(help="The file, or the directory for hf and dcp, to write.")],
        format: Annotated[
            str | None, typer.Option(help="safetensors, torch, dcp or hf; by default as FILE's suffix says.")
        ] = None,
        optimizer: Annotated[
            bool, typer.Option("--optimizer", help="The optimizer's state as well (torch and dcp).")
        ] = False,
        max_shard_bytes: Annotated[
            int, typer.Option(min=1, help="Above it a model is divided into several safetensors files.")
        ] = 5_000_000_000,
        config: Annotated[Path | None, typer.Option(help="The config.json of an hf directory.")] = None,
        overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")] = False,
    ) -> None:
        """Write the weights of CHECKPOINT to FILE, whole and under their own names, for others to read."""
        from fsshard.checkpoint.exporting import export as write

        for path in write(
            checkpoint,
            file,
            format,
            optimizer=optimizer,
            max_shard_bytes=max_shard_bytes,
            config=config,
            overwrite=overwrite,
        ):
            print(path)


def _add_import(app: "typer.Typer") -> None:
    import typer

    @app.command("import")
    def import_(
        source: Annotated[
            Path, typer.Argument(help="Safetensors, a Hugging Face or DCP directory, a .pt, a neuraloperator folder.")
        ],
        destination: Annotated[Path, typer.Argument(help="The checkpoint to write.")],
        trust_pickle: Annotated[
            bool, typer.Option("--trust-pickle", help="Run whatever code is in SOURCE: only if you know who wrote it.")
        ] = False,
        optimizer: Annotated[bool, typer.Option(help="Take optimizer states along.")] = True,
    ) -> None:
        """Make a checkpoint of what others have written, for fsshard.load."""
        from fsshard.checkpoint.importing import import_checkpoint

        print(import_checkpoint(source, destination, trust_pickle=trust_pickle, optimizer=optimizer))


def _add_estimate(app: "typer.Typer") -> None:
    import typer

    @app.command()
    def estimate(
        recipe: Annotated[str, typer.Argument(help="module:attribute, importable from the current folder.")],
        backends: Annotated[
            str | None, typer.Option(help="Comma list of backends.", show_default=DEFAULT_BACKENDS)
        ] = None,
        world_size: Annotated[
            list[str] | None, typer.Option(help="Numbers of ranks: repeat it, or give a comma list.", show_default="2")
        ] = None,
        device: Annotated[str, typer.Option(help="What it is for: cpu or cuda.")] = "cpu",
        mixed_precision: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16; else the recipe's.")] = None,
        activation_checkpointing: Annotated[
            bool, typer.Option("--activation-checkpointing", help="Recompute blocks in the backward.")
        ] = False,
        accumulation: Annotated[
            int | None, typer.Option(min=1, help="Backward passes per step; else the recipe's.")
        ] = None,
        cpu_offload: Annotated[bool, typer.Option("--cpu-offload", help="What is left on the device then.")] = False,
        real: Annotated[bool, typer.Option("--real", help="Run on real tensors, as one rank.")] = False,
        json_file: Annotated[
            str | None, typer.Option("--json", metavar="FILE", help="Write the estimates as JSON; - is stdout.")
        ] = None,
        picture: Annotated[
            str | None,
            typer.Option("--plot", metavar="FILE", help="Draw them, and 1 to 4096 ranks: .png, .svg or .pdf."),
        ] = None,
        progress: Annotated[
            bool | None, typer.Option(help="A progress bar on stderr; by default if that is a terminal.")
        ] = None,
        quiet: Annotated[bool, typer.Option("--quiet", "-q", help="The table only, and no progress bar.")] = False,
    ) -> None:
        """Memory and traffic of a training step of RECIPE per rank, before it is launched and without a GPU.

        The exit code is 0; 2 for bad input, which includes a step that reads numbers.
        """
        from fsshard.estimate import command

        _check_recipe(recipe)
        arguments: dict[str, Any] = {"device": device, "real": real, "cpu_offload": cpu_offload}
        if mixed_precision is not None:
            arguments["mixed_precision"] = mixed_precision
        if activation_checkpointing:
            arguments["activation_checkpointing"] = True
        if accumulation is not None:
            arguments["accumulation"] = accumulation
        names, sizes = _names("--backends", backends) or DEFAULT_BACKENDS.split(","), _sizes(world_size or ["2"])
        with _progress_bar(False if quiet else progress, sys.stderr) as bar:
            shown = bar(recipe)
            tell = None if shown is None else lambda done, of: shown(done, of, "simulated")
            files = {"json_file": json_file, "picture": picture}
            command.run(recipe, names, sizes, arguments, **files, quiet=quiet, progress=tell)


def _add_tune(app: "typer.Typer") -> None:
    import typer

    @app.command()
    def tune(
        recipe: Annotated[str, typer.Argument(help="module:attribute, importable from the current folder.")],
        world_size: Annotated[int, typer.Option(min=1, help="Number of ranks.")] = 2,
        memory: Annotated[
            str | None, typer.Option(help="What a rank may need, such as 40GiB; else the least is looked for.")
        ] = None,
        backends: Annotated[str, typer.Option(help="Comma list of backends.")] = "fsdp2",
        device: Annotated[str, typer.Option(help="What it is for: cpu or cuda.")] = "cpu",
        mixed_precision: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16; else the recipe's.")] = None,
        limit: Annotated[
            int | None,
            typer.Option(min=1, help="Simulations after which nothing more is considered.", show_default="12 to 40"),
        ] = None,
        real: Annotated[bool, typer.Option("--real", help="Run on real tensors, as one rank.")] = False,
        json_file: Annotated[
            str | None, typer.Option("--json", metavar="FILE", help="Write all plans as JSON; - is stdout.")
        ] = None,
        picture: Annotated[
            str | None, typer.Option("--plot", metavar="FILE", help="Draw peak against traffic: .png, .svg or .pdf.")
        ] = None,
        progress: Annotated[
            bool | None, typer.Option(help="A progress bar on stderr; by default if that is a terminal.")
        ] = None,
    ) -> None:
        """Search for the plan of RECIPE that sends least and fits, by simulation, and print it as code to paste.

        The exit code is 0; 2 for bad input, which includes a bound that no plan fits.
        """
        from fsshard.tuning import command

        _check_recipe(recipe)
        arguments: dict[str, Any] = {"memory": memory, "device": device, "real": real, "limit": limit}
        if mixed_precision is not None:
            arguments["mixed_precision"] = mixed_precision
        names = _names("--backends", backends)
        with _progress_bar(progress, sys.stderr) as bar:
            shown = bar(recipe)
            tell = None if shown is None else lambda done, text: shown(done, limit or done + 1, text)
            command.run(
                recipe,
                names or [],
                {**arguments, "world_size": world_size},
                json_file=json_file,
                picture=picture,
                progress=tell,
            )


def _add_doctor(app: "typer.Typer") -> None:
    import typer

    @app.command()
    def doctor(
        timeout: Annotated[float, typer.Option(min=1.0, help="Seconds that each trial on ranks may take.")] = 20.0,
        json_file: Annotated[
            str | None, typer.Option("--json", metavar="FILE", help="Write the findings as JSON; - is stdout.")
        ] = None,
    ) -> None:
        """Say what this machine can do: torch, devices, collectives, backends, and what missing extras would bring.

        The exit code is 0 if training on the CPU works, 1 if not, 2 for bad input.
        """
        from fsshard.parity.render import check_file

        if json_file not in (None, "-"):
            check_file(str(json_file))
        raise typer.Exit(_run_doctor(timeout, json_file))


def _run_doctor(timeout: float, json_file: str | None) -> int:
    from rich.console import Console

    from fsshard.doctor import examine

    with _held_output(show=False):
        found = examine(timeout=timeout)
    console = Console(file=sys.stderr if json_file == "-" else sys.stdout)
    if console.is_terminal:
        console.print(found.table())
        console.print("\n".join([*found.details(), found.verdict]), markup=False, highlight=False)
    else:
        print(found, file=console.file)
    if json_file is not None:
        _write_json(json_file, found.to_json())
    return AGREED if found.ok else DIFFERENT


@dataclass(kw_only=True)
class _Request:
    """What ``fsshard parity`` was asked for.

    Attributes:
        progress: whether to show a bar; None means if stderr is a terminal.
        options: of ``compare``, passed on as they are.
        misplaced: options that were given and mean nothing to ``--golden``.
    """

    recipes: list[str]
    backends: list[str] | None
    world_sizes: list[int]
    options: dict[str, Any] = field(default_factory=dict)
    json_file: str | None
    picture: str | None
    progress: bool | None
    quiet: bool
    misplaced: list[str] = field(default_factory=list)

    @property
    def out(self) -> TextIO:
        """Where the tables go: not to stdout if the JSON goes there."""
        return sys.stderr if self.json_file == "-" else sys.stdout


def _names(option: str, text: str | None) -> list[str] | None:
    if text is None:
        return None
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ConfigurationError(f"{option} {text!r}: expected a comma list, for example {option} {DEFAULT_BACKENDS}")
    return names


def _sizes(texts: Sequence[str]) -> list[int]:
    parts = [part.strip() for text in texts for part in text.split(",") if part.strip()]
    if not parts or not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise ConfigurationError(
            f"--world-size {','.join(texts)!r}: expected positive whole numbers, for example --world-size 1,2"
        )
    return list(dict.fromkeys(map(int, parts)))


# parity


def _run_parity(request: _Request) -> int:
    _check(request)
    results = _compare_all(request)
    for name, result in results.items():
        _show(request, name, result)
    if request.json_file is not None:
        texts = [_json(name, result) for name, result in results.items()]
        _write_json(request.json_file, texts[0] if len(request.recipes) == 1 else f"[{','.join(texts)}]")
    pictures = _picture_files(request.picture, request.recipes)
    for name, result in results.items():
        if pictures and not isinstance(result, BaseException):
            result.plot(pictures[name])
    return max((_code(result) for result in results.values()), default=BAD_INPUT)


def _check(request: _Request) -> None:
    """Raise for whatever is wrong with the options, before minutes are spent on the runs."""
    from fsshard.parity.render import check_picture

    if not request.recipes:
        raise ConfigurationError("expected a RECIPE, for example: fsshard parity examples.recipes:tfno (or --golden)")
    _check_common(request)
    for file in _picture_files(request.picture, request.recipes).values():
        check_picture(file)


def _check_common(request: _Request) -> None:
    from fsshard.backends import backend_class
    from fsshard.parity.render import check_file

    for name in request.backends or ():
        backend_class(name, 2)
    if request.json_file not in (None, "-"):
        check_file(str(request.json_file))


def _compare_all(request: _Request) -> dict[str, "ParityReport | BaseException"]:
    """Recipe -> its report, or what stopped the comparison. One bad recipe does not lose the others' results."""
    from fsshard.parity import compare
    from fsshard.ranks import RankPool

    backends = request.backends or DEFAULT_BACKENDS.split(",")
    results: dict[str, ParityReport | BaseException] = {}
    with ExitStack() as stack:
        stderr = stack.enter_context(_held_output(show=not request.quiet))
        for name in request.recipes:
            _check_recipe(name)
        bar = stack.enter_context(_progress_bar(request.progress, stderr))
        pool = stack.enter_context(RankPool(device=request.options["device"]))
        for name in request.recipes:
            try:
                results[name] = compare(
                    name,
                    backends=backends,
                    world_sizes=request.world_sizes,
                    pool=pool,
                    progress=bar(name),
                    **request.options,
                )
            except (FsshardError, KeyboardInterrupt) as error:
                results[name] = error
                if isinstance(error, KeyboardInterrupt):
                    break
    return results


def _told(name: str, error: BaseException) -> str:
    """An error's text, with the recipe's name before it unless it is there already."""
    text = str(error) or ("interrupted" if isinstance(error, KeyboardInterrupt) else type(error).__name__)
    return text if text.startswith((name, repr(name))) else f"{name}: {text}"


def _json(name: str, result: "ParityReport | BaseException") -> str:
    if isinstance(result, BaseException):
        return json.dumps({"recipe": name, "ok": False, "error": str(result) or "interrupted"}, indent=1)
    return result.to_json()


def _check_recipe(name: str) -> None:
    """Import a recipe, with what its own code raises put into words.

    Raises:
        RecipeError: ``name`` means none. With the traceback, where the fault is inside of the recipe's module.
    """
    from fsshard.parity.recipe import resolve

    try:
        with redirect_stdout(sys.stderr):  # what it prints must not get into the JSON
            resolve(name)
    except FsshardError as error:
        raise RecipeError(_told(name, error)) from error
    except ImportError as error:
        raise RecipeError(f"{name!r} cannot be imported: {error}") from error
    except Exception as error:
        lines = traceback.format_exc()
        raise RecipeError(f"{name!r} cannot be made: {type(error).__name__}: {error}\n\n{lines}") from error


def _code(result: "ParityReport | BaseException") -> int:
    if isinstance(result, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(result, BaseException):
        return BAD_INPUT if isinstance(result, (ConfigurationError, MissingExtra)) else DIFFERENT
    return AGREED if result.ok else DIFFERENT


def _show(request: _Request, name: str, result: "ParityReport | BaseException") -> None:
    """Print a report as its stream deserves, and an error as one line."""
    if isinstance(result, BaseException):
        print(f"fsshard: {_told(name, result)}", file=sys.stderr)
        return
    from rich.console import Console

    from fsshard.parity.render import details, head, summary

    console = Console(file=request.out)
    if request.quiet:
        print(f"{result.recipe}: {summary(result)}", file=request.out)
        for warning in result.warnings:
            print(f"fsshard: {result.recipe}: {warning}", file=sys.stderr)
    elif not console.is_terminal:  # a log: no frames that are cut at 80 columns
        print(f"{result}\n", file=request.out)
    else:
        console.print(result.table() if result.cells else head(result), markup=False, highlight=False)
        for paragraph in details(result):
            console.print(f"{paragraph}\n", markup=False, highlight=False)
        console.print(
            f"{summary(result)}\n", style="bold green" if result.ok else "bold red", markup=False, highlight=False
        )


def _picture_files(file: str | None, recipes: list[str]) -> dict[str, Path]:
    """Recipe -> file. With several recipes each has its name in it: ``parity-tfno.png``."""
    if file is None:
        return {}
    path = Path(file)
    if len(recipes) == 1:
        return {recipes[0]: path}
    short = [recipe.partition(":")[2] for recipe in recipes]
    names = short if len(set(short)) == len(short) else [recipe.replace(":", ".") for recipe in recipes]
    return {
        recipe: path.with_name(f"{path.stem}-{name}{path.suffix}") for recipe, name in zip(recipes, names, strict=True)
    }


def _write_json(file: str, text: str) -> None:
    if file == "-":
        print(text)
    else:
        Path(file).write_text(text + "\n", encoding="utf-8")


# golden runs


def _run_golden(request: _Request) -> int:
    if request.recipes:
        raise ConfigurationError(f"--golden has recipes of its own; leave out {', '.join(request.recipes)}")
    if request.misplaced:
        raise ConfigurationError(
            f"golden runs have steps, ranks and a device of their own; leave out {', '.join(request.misplaced)}"
        )
    if request.picture is not None:
        raise ConfigurationError("--golden draws nothing; leave out --plot")
    _check_common(request)
    results = _golden_results(request)
    entries = []
    for backend, found in results.items():
        if isinstance(found, BaseException):
            said = str(found).strip().partition("\n")[0] or "interrupted"
            print(f"fsshard: golden runs under {backend}: {said}", file=sys.stderr)
            entries.append({"backend": backend, "ok": False, "error": said})
            continue
        for result in found:
            if not (request.quiet and result.ok):
                said = f": {result.text}" if result.text else ""
                print(f"{result.name} under {backend}: {result.verdict}{said}", file=request.out)
            entries.append({"backend": backend, **asdict(result), "ok": result.ok})
    if request.json_file is not None:
        _write_json(request.json_file, json.dumps(entries))
    return max((_golden_code(found) for found in results.values()), default=DIFFERENT)


def _golden_results(request: _Request) -> dict[str, "list[GoldenResult] | BaseException"]:
    """Backend -> what its golden runs gave, or what stopped them."""
    check = importlib.import_module("fsshard.parity.golden").check
    results: dict[str, list[GoldenResult] | BaseException] = {}
    with ExitStack() as stack:
        stderr = stack.enter_context(_held_output(show=not request.quiet))
        bar = stack.enter_context(_progress_bar(request.progress, stderr))
        for backend in dict.fromkeys(request.backends or GOLDEN_BACKENDS):
            shown = bar(f"golden, {backend}")
            try:
                results[backend] = check(backend=backend, timeout=request.options["timeout"], progress=shown)
            except (FsshardError, KeyboardInterrupt) as error:
                results[backend] = error
                if isinstance(error, KeyboardInterrupt):
                    break
    return results


def _golden_code(found: "list[GoldenResult] | BaseException") -> int:
    if isinstance(found, BaseException):
        return _code(found)
    return AGREED if found and all(result.ok for result in found) else DIFFERENT


# output


@contextmanager
def _held_output(show: bool) -> Iterator[TextIO]:
    """Hold back what this process and its ranks print meanwhile, and show it on stderr afterwards, each line once.

    Warnings of torch, one per rank and run, would tear the progress bar to pieces, and whatever a recipe prints would
    end up in the JSON. Ranks are processes, so it must be done to the file descriptors.

    Args:
        show: whether to show it at all where nothing goes wrong.

    Yields:
        The true stderr.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    with ExitStack() as stack:
        held = stack.enter_context(tempfile.TemporaryFile())
        terminal = stack.enter_context(_true_stderr())
        saved = {number: os.dup(number) for number in (1, 2)}
        for number in saved:
            os.dup2(held.fileno(), number)
        try:
            # sys.stdout need not lead to descriptor 1: notebooks and test runners have streams of their own.
            with os.fdopen(os.dup(held.fileno()), "w", buffering=1, encoding="utf-8", errors="replace") as stream:
                with redirect_stdout(stream), redirect_stderr(stream):
                    yield terminal
        except BaseException:
            show = True
            raise
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, copy in saved.items():
                os.dup2(copy, number)
                os.close(copy)
            held.seek(0)
            if show:
                _replay(held.read().decode(errors="replace"))


@contextmanager
def _true_stderr() -> Iterator[TextIO]:
    """A stream to where stderr leads now, whatever becomes of descriptor 2."""
    try:
        direct = sys.stderr.fileno() == 2
    except (OSError, AttributeError):
        direct = False
    if not direct:
        yield sys.stderr
        return
    with os.fdopen(os.dup(2), "w", encoding=sys.stderr.encoding, errors="backslashreplace") as copy:
        yield copy


def _replay(text: str) -> None:
    for line in dict.fromkeys(line.rstrip() for line in text.splitlines() if line.strip()):
        print(line, file=sys.stderr)


@contextmanager
def _progress_bar(wanted: bool | None, stderr: TextIO) -> Iterator[Callable[[str], Progress | None]]:
    """Yields ``name -> progress callback`` with a bar per name; callbacks are None where no bar is shown."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    if wanted is None:
        wanted = stderr.isatty()
    if not wanted:
        yield lambda name: None
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[text]}", markup=False),
    )
    # Output is held back on the descriptors; rich must not hold back sys.stdout once more.
    console = Console(file=stderr, force_terminal=True)
    with Progress(*columns, console=console, redirect_stdout=False, redirect_stderr=False, transient=True) as shown:

        def bar(name: str) -> Callable[[float, float, str], None]:
            task = shown.add_task(name, total=None, text="")
            return lambda done, total, text: shown.update(task, completed=done, total=total, text=text)

        yield bar
