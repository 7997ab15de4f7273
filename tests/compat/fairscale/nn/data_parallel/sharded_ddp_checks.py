"""What ranks run to look at one thing of ShardedDataParallel."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import logging
import pickle
import subprocess
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fairscale.nn.data_parallel as real_parallel
import fairscale.optim.oss as real_oss
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsshard.compat.errors import GradientError, MisuseError
from fsshard.compat.fairscale.nn.data_parallel import ShardedDataParallel
from fsshard.compat.fairscale.optim.oss import OSS
from fsshard.errors import FsshardError
from fsshard.oss import gradient_buckets
from tests.compat.fairscale.nn.data_parallel import sharded_ddp_trainings as trainings
from tests.compat.fairscale.nn.data_parallel.sharded_ddp_trainings import Words, batch, build, loss_of, mlp, values
from tests.forked import run_script


def compared(train: str, reference: str, args: tuple[Any, ...], kw: dict[str, Any]) -> list[str]:
    return trainings.compare(getattr(trainings, train), reference, *args, **kw)


def distance(train: str, reference: str, args: tuple[Any, ...], kw: dict[str, Any]) -> float:
    return trainings.furthest(getattr(trainings, train), reference, *args, **kw)


def raw_distance(train: str, reference: str, args: tuple[Any, ...], kw: dict[str, Any]) -> float:
    return trainings.furthest(getattr(trainings, train), reference, *args, kind="real", **kw)


def error_of(call: Callable[[], Any], kind: type[Exception] = Exception) -> str | None:
    try:
        call()
    except kind as error:
        return f"{type(error).__name__}: {error}"
    return None


@contextlib.contextmanager
def warnings_of(name: str) -> Iterator[list[str]]:
    found: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    logger, handler = logging.getLogger(name), Handler(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)


# ------------------------------------------------------------------------------------------------ accumulation


def job_no_sync_alone() -> tuple[bool, int]:
    module = mlp()
    wrapped, optimizer = build("ours", module)
    with warnings_of("fsshard") as warned:
        for step in range(2):
            with wrapped.no_sync():
                loss_of(wrapped, step).backward()
            optimizer.step()
            optimizer.zero_grad()
    expected = trainings.mlp()
    reference, plain = build("ddp", expected)
    for step in range(2):
        loss_of(reference, step).backward()
        plain.step()
        plain.zero_grad()
    same = all(torch.equal(a, b) for a, b in zip(values(module), values(expected), strict=True))
    return same, sum("no_sync" in text for text in warned)


# ------------------------------------------------------------------------------------------------ raw faults


def job_raw_flush() -> int:
    """How many gradients are missing when FairScale ends its reduction."""
    from fairscale.nn.checkpoint import checkpoint_wrapper

    torch.manual_seed(0)
    module = nn.Sequential(*(checkpoint_wrapper(nn.Linear(8, 8)) for _ in range(3)))
    wrapped, _ = build("real", module, reduce_buffer_size=0)
    missing: list[int] = []
    flush = wrapped._flush_reduce_calls

    def flushed() -> None:
        missing.append(sum(wrapped._grad_to_be_reduced))
        flush()

    wrapped._flush_reduce_calls = flushed
    wrapped(batch(0).requires_grad_()).sum().backward()
    for handle in wrapped._work_handles:
        handle.handle.wait()
    return missing[0]


RAW_UNUSED = """
import os, sys, tempfile, torch, torch.distributed as dist
from torch import nn
from fairscale.nn.data_parallel import ShardedDataParallel
from fairscale.optim.oss import OSS
torch.set_num_threads(1)
rank = 0 if os.fork() else 1
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=2)
class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 8), nn.Linear(8, 64), nn.Linear(64, 8)
    def forward(self, x):
        h = self.first(x)
        return h if rank else h + self.last(self.middle(h))
module = Branch()
optimizer = OSS(module.parameters(), lr=0.1)
model = ShardedDataParallel(module, optimizer, reduce_buffer_size=0)
model(torch.ones(2, 8)).sum().backward()
optimizer.step()
print("survived", flush=True)
if not rank:
    os._exit(os.waitstatus_to_exitcode(os.wait()[1]) & 127)
"""


def raw_unused_aborts() -> bool:
    """Whether FairScale's ranks die, or wait for ever, where one does not use a layer."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        (script := Path(folder, "raw.py")).write_text(RAW_UNUSED)
        try:
            ran = run_script(script, [f"{folder}/store"], {}, timeout=60)
        except subprocess.TimeoutExpired:
            return True
    return ran.stdout.count("survived") < 2 and "ModuleNotFoundError" not in ran.stderr


def job_raw_mixed() -> str | None:
    def train() -> None:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(8, 8, dtype=torch.bfloat16), nn.LayerNorm(8), nn.Linear(8, 8))
        optimizer = real_oss.OSS(module.parameters(), lr=0.1)
        real_parallel.ShardedDataParallel(module, optimizer)(batch(0))

    return error_of(train)


def job_raw_sparse() -> str | None:
    module = Words(tied=False)
    wrapped, _ = build("real", module, reduce_buffer_size=0)
    return error_of(lambda: wrapped(torch.tensor([1, 2])).sum().backward())


# ------------------------------------------------------------------------------------------------ float16


def job_half(size: int) -> tuple[bool, bool]:
    """Whether it is FairScale's result, and not float32's."""
    ours = trainings.train_reducing_in_half_precision("ours", size)
    real = trainings.train_reducing_in_half_precision("real", 0)
    full = trainings.train_zeroing("ours", "wrapper")
    return (
        all(torch.equal(a, b) for a, b in zip(ours, real, strict=True)),
        any(not torch.equal(a, b) for a, b in zip(ours, full, strict=True)),
    )


# ------------------------------------------------------------------------------------------------ compiling, copies


def job_compiled() -> tuple[float, float, float]:
    def train(kind: str, where: str) -> list[Tensor]:
        module = mlp()
        inside: Any = torch.compile(module, backend="eager") if where == "inner" else module
        wrapped, optimizer = build(kind, inside, list(module.parameters()))
        called: Any = torch.compile(wrapped, backend="eager") if where == "outer" else wrapped
        for step in range(3):
            optimizer.zero_grad()
            called(batch(step)).square().mean().backward()
            optimizer.step()
        return values(module)

    reference = train("ddp", "")

    def off(got: list[Tensor]) -> float:
        return max(float((a - b).abs().max()) for a, b in zip(reference, got, strict=True))

    return off(train("ours", "outer")), off(train("ours", "inner")), off(train("real", "outer"))


def job_copies() -> tuple[Any, ...]:
    module = mlp()
    raw, _ = build("real", mlp())
    wrapped, optimizer = build("ours", module)
    loss_of(wrapped, 0).backward()
    optimizer.step()
    stored = io.BytesIO()
    torch.save(wrapped, stored)
    stored.seek(0)
    copies = [copy.deepcopy(wrapped), torch.load(stored, weights_only=False), pickle.loads(pickle.dumps(wrapped))]
    right = [torch.equal(each(batch(1)), wrapped(batch(1))) for each in copies]
    apart = all(next(each.parameters()) is not next(module.parameters()) for each in copies)
    refused = [error_of(lambda each=each: loss_of(each, 1).backward(), FsshardError) for each in copies]
    deep, saved = (error_of(lambda f=f: f(raw)) for f in (copy.deepcopy, pickle.dumps))
    return (
        str(deep).partition(":")[0],
        str(saved).partition(":")[0],
        all(right) and apart,
        all(text is not None and "is a copy" in text for text in refused),
        isinstance(copies[0], ShardedDataParallel) and copies[0].state_dict().keys() == wrapped.state_dict().keys(),
    )


def job_gradients() -> tuple[dict[str, set[str]], ...]:
    expected = mlp()
    reference, _ = build("ddp", expected)
    loss_of(reference, 0).backward()

    def look(kind: str, **options: Any) -> dict[str, set[str]]:
        module = mlp()
        wrapped, optimizer = build(kind, module, **options)
        loss_of(wrapped, 0).backward()
        found: dict[str, set[str]] = {"owner": set(), "other": set()}
        for parameter, right in zip(module.parameters(), expected.parameters(), strict=True):
            who = "owner" if optimizer._param_to_rank[parameter] == dist.get_rank() else "other"
            if parameter.grad is None:
                found[who].add("none")
            else:
                found[who].add("mean" if torch.equal(parameter.grad, right.grad) else "garbage")
        return found

    return look("ours"), look("ours", reduce_buffer_size=0), look("real")


def unequal(one: list[Any], other: list[Any]) -> list[int]:
    """Where two lists of tensors differ."""
    return [i for i, (a, b) in enumerate(zip(one, other, strict=True)) if not torch.equal(a, b)]


def job_torch_clip(kind: str, norm_type: float, pattern: str, **options: Any) -> list[Any]:
    """Norms by torch's own function, and the parameters after two steps."""
    module = mlp()
    wrapped, optimizer = build(kind, module, **options)
    found: list[Any] = []
    for step in range(3):
        if pattern == "bias left out":
            parameters = [p for n, p in module.named_parameters() if not n.endswith("bias")]
        else:
            parameters = list(wrapped.parameters())
        loss_of(wrapped, step).backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 0.01, norm_type)
        optimizer.step()
        optimizer.zero_grad()
        found.append(norm)
    return [*found, *(p.detach().clone() for p in module.parameters())]


def job_norm_on_one_rank() -> bool:
    """Asking for a norm without clipping is no collective: one rank may do it alone, and sees its own gradients."""
    module = mlp()
    wrapped, optimizer = build("ours", module)
    loss_of(wrapped, 0).backward()
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    if dist.get_rank() == 0:
        assert torch.isfinite(torch.nn.utils.get_total_norm(gradients))
    optimizer.step()
    return torch.isfinite(torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)).item() is True


def job_zeroing_in_turns() -> list[bool]:
    """Gradients are zeroed and dropped in turns, and once come past the wrapper."""
    module, reference = mlp(), mlp()
    wrapped, optimizer = build("ours", module)
    by_ddp, plain = build("ddp", reference)
    found: list[bool] = []
    for step in range(6):
        for each, optim in ((wrapped, optimizer), (by_ddp, plain)):
            inner = each.module if step == 4 else each
            if step == 4:  # not through the wrapper: reduced at the step under ours, by hand under DDP
                loss_of(inner, step).backward()
                if each is by_ddp:
                    for parameter in reference.parameters():
                        parameter.grad /= dist.get_world_size()
                        dist.all_reduce(parameter.grad)
            else:
                loss_of(each, step).backward()
            optim.step()
            if step % 2:
                optim.zero_grad(set_to_none=step == 3)
            else:
                each.zero_grad(set_to_none=False)
        pairs = zip(module.parameters(), reference.parameters(), strict=True)
        found.append(all(torch.equal(a, b) for a, b in pairs))
    return found


# ------------------------------------------------------------------------------------------------ buckets


def job_exact_sums() -> bool:
    """Small whole numbers times 1/3: three equal parts are the same in any order."""
    module = nn.Linear(4, 3, bias=False)
    wrapped, optimizer = build("ours", module)
    reference = nn.Linear(4, 3, bias=False)
    reference.load_state_dict(module.state_dict())
    by_hand, _ = build("hand", reference)
    x = torch.ones(2, 4)
    wrapped(x).sum().backward()
    by_hand(x).sum().backward()
    by_hand.after()
    owner = optimizer._param_to_rank[module.weight]
    return torch.equal(module.weight.grad, reference.weight.grad) if owner == dist.get_rank() else True


def job_launches() -> list[list[str]]:
    """Where each bucket left: inside of a hook in backward, or at its end."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(12)))
    wrapped, optimizer = build("ours", module, reduce_buffer_size=150)
    rounds: list[list[str]] = []
    launch = gradient_buckets.GradientBucket.launch

    def launched(self: Any, arrived: set[int]) -> None:
        rounds[-1].append("backward" if len(arrived) < 24 else "end")
        launch(self, arrived)

    gradient_buckets.GradientBucket.launch = launched  # type: ignore[method-assign]
    try:
        for step in range(2):
            rounds.append([])
            loss_of(wrapped, step).backward()
            optimizer.zero_grad()
    finally:
        gradient_buckets.GradientBucket.launch = launch  # type: ignore[method-assign]
    return rounds


def _written() -> int:
    with open("/proc/self/io", encoding="ascii") as file:
        return int(dict(line.split(": ") for line in file.read().splitlines())["wchar"])


def job_bytes() -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of one step: what a rank hands to collectives for others, and what it writes to its sockets."""
    counted = [0]
    patched = {"all_to_all_single": lambda o, i, *a, **k: i, "reduce": lambda t, *a, **k: t}
    patched["broadcast"] = lambda t, *a, **k: t
    originals = {name: getattr(dist, name) for name in patched}

    def counting(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensor = patched[name](*(args or (kwargs.pop("tensor"),)), **kwargs)
            counted[0] += tensor.numel() * tensor.element_size()
            return originals[name](*(args or (tensor,)), **kwargs)

        return call

    def measure(kind: str) -> dict[str, int]:
        torch.manual_seed(0)
        module = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
        wrapped, optimizer = build(kind, module, settings=trainings.ADAM)
        x = torch.ones(2, 64)
        for step in range(4):
            if step == 2:
                dist.barrier()
                before, counted[0] = _written(), 0
            wrapped.zero_grad()
            wrapped(x).sum().backward()
            optimizer.step()
        return {"payload": counted[0], "written": _written() - before}

    for name in patched:
        setattr(dist, name, counting(name))
    try:
        return measure("ours"), measure("real")
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


# ------------------------------------------------------------------------------------------------ buffers, start


def job_buffers() -> dict[str, float]:
    def value(by: str) -> float:
        module = nn.Linear(8, 8)
        wrapped, _ = build("ours", module, broadcast_buffers=by in ("default", "no_sync"))
        module.register_buffer("rank", torch.tensor(float(dist.get_rank())))
        with wrapped.no_sync() if by == "no_sync" else contextlib.nullcontext():
            wrapped(batch(0))
        if by == "by hand":
            wrapped.sync_buffers(blocking=True)
        return float(module.rank)

    return {by: value(by) for by in ("default", "off", "no_sync", "by hand")}


class WithMore(nn.Linear):
    """A state dict that has more than tensors in it."""

    def get_extra_state(self) -> Any:
        return {"version": 1}

    def set_extra_state(self, state: Any) -> None:
        pass


def job_start() -> tuple[bool, bool]:
    def start(sync: bool) -> bool:
        torch.manual_seed(dist.get_rank())
        module = WithMore(8, 8)
        module.register_buffer("kept", torch.randn(2))
        module.register_buffer("passing", torch.randn(2) > 0 if sync else torch.randn(2), persistent=False)
        build("ours", module, sync_models_at_startup=sync)
        torch.manual_seed(0)
        first = WithMore(8, 8)
        return torch.equal(first.weight, module.weight) and torch.equal(module.kept, torch.randn(2))

    return start(True), start(False)


# ------------------------------------------------------------------------------------------------ errors, ends


class Fails(torch.autograd.Function):
    """A backward that raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ValueError("planted")


class Breakable(nn.Module):
    """Its backward raises half-way where asked to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, fail: bool) -> Tensor:
        h = self.first(x)
        return self.last(Fails.apply(h) if fail else h)


def job_error_under_no_sync() -> list[bool]:
    """Nothing was sent: one rank drops its gradients and goes on."""
    module, expected = Breakable(), Breakable()
    wrapped, optimizer = build("ours", module)
    reference, plain = build("ddp", expected)
    for step in range(3):
        if dist.get_rank() == 1:
            with contextlib.suppress(ValueError), wrapped.no_sync():
                loss_of(wrapped, step, True).backward()
        optimizer.zero_grad()
        for each, updates in ((wrapped, optimizer), (reference, plain)):
            loss_of(each, step, False).backward()
            updates.step()
            updates.zero_grad()
    return [torch.equal(a, b) for a, b in zip(values(module), values(expected), strict=True)]


def job_error_in_backward() -> tuple[str, str, bool]:
    """Every rank fails half-way through the model; the next forward, and the next step, say so."""
    wrapped, optimizer = build("ours", Breakable())
    loss_of(wrapped, 0, False).backward()
    optimizer.step()
    planted = error_of(lambda: loss_of(wrapped, 1, True).backward(), ValueError)
    optimizer.zero_grad()
    forward = error_of(lambda: loss_of(wrapped, 2, False), GradientError)
    step = error_of(optimizer.step, GradientError)
    return (
        "forward" if forward and "earlier backward" in forward else str(forward),
        "step" if step and "earlier backward" in step else str(step),
        planted == "ValueError: planted",
    )


def job_no_sync_error() -> tuple[bool, bool]:
    wrapped, _ = build("ours", mlp())
    raw, _ = build("real", mlp())
    for each in (wrapped, raw):
        with contextlib.suppress(KeyError), each.no_sync():
            raise KeyError
    return wrapped._should_accumulate_grads, raw._should_accumulate_grads


def job_garbage() -> tuple[bool, bool]:
    module = mlp()
    wrapped, optimizer = build("ours", module)
    for step in range(2):
        loss_of(wrapped, step).backward()
        optimizer.step()
    kept = [p.expand_as(p).grad_fn for p in module.parameters()]  # C++ holds the parameters
    gone = weakref.ref(wrapped), weakref.ref(optimizer)
    del wrapped, optimizer
    gc.collect()
    assert kept
    return gone[0]() is None, gone[1]() is None


def job_taken_over() -> str | None:
    module = mlp()
    older, optimizer = build("ours", module)
    newer = ShardedDataParallel(module, optimizer)
    loss_of(newer, 0).backward()
    optimizer.step()
    with torch.no_grad():
        assert torch.equal(older(batch(0)), newer(batch(0)))
    older.eval()
    loss = loss_of(older, 1)
    assert error_of(loss.backward, GradientError)
    older.train()
    return error_of(lambda: loss_of(older, 1), GradientError)


# ------------------------------------------------------------------------------------------------ the surface


def job_surface() -> list[str]:
    """What FairScale's users see of it, on one rank."""
    import inspect

    module = mlp()
    module.banana = "sweet"  # type: ignore[assignment]
    wrapped, optimizer = build("ours", module)
    raw, _ = build("real", mlp())
    seen = {
        "signature": inspect.signature(ShardedDataParallel.__init__).parameters.keys()
        == inspect.signature(real_parallel.ShardedDataParallel.__init__).parameters.keys(),
        "defaults": [p.default for p in inspect.signature(ShardedDataParallel.__init__).parameters.values()]
        == [p.default for p in inspect.signature(real_parallel.ShardedDataParallel.__init__).parameters.values()],
        "zero_grad": inspect.signature(wrapped.zero_grad).parameters["set_to_none"].default is False,
        "module": wrapped.module is module,
        "attributes": wrapped.banana == "sweet" and not hasattr(wrapped, "orange"),
        "multi device": wrapped.is_multi_device_module is raw.is_multi_device_module is False,
        "device type": wrapped.device_type == raw.device_type == "cpu",
        "keys": wrapped.state_dict().keys() == raw.state_dict().keys(),
        "train": wrapped.train() is wrapped,
        "to": wrapped.to("cpu") is wrapped and wrapped.to(torch.device("cpu"), torch.float32) is wrapped,
        "names": {n for n in dir(raw) if not n.startswith("_")} <= set(dir(wrapped)) | {"T_destination"},
    }
    loss_of(wrapped, 0).backward()
    optimizer.step()
    wrapped.to(dtype=torch.float64)
    seen["dtype"] = all(p.dtype == torch.float64 for p in module.parameters())
    wrapped(batch(0).double()).sum().backward()
    optimizer.step()
    wrapped.zero_grad()
    seen["zeroed"] = all(p.grad is not None and not p.grad.any() for p in module.parameters())
    return [name for name, right in seen.items() if not right]


def job_misuse() -> list[str]:
    module, empty = mlp(), nn.Flatten()
    optimizer = OSS(module.parameters(), lr=0.1)
    wrapped = ShardedDataParallel(module, optimizer)
    calls: dict[str, tuple[Callable[[], Any], str]] = {
        "plain": (lambda: ShardedDataParallel(module, torch.optim.SGD(module.parameters())), "SGD"),
        "none": (lambda: ShardedDataParallel(module, []), "empty"),
        "no parameters": (lambda: ShardedDataParallel(empty, optimizer), "no parameters"),
        "device": (lambda: wrapped.to("meta"), "before OSS is built"),
        "nothing to reduce": (wrapped.reduce, "no gradients wait"),
    }
    found = {name: error_of(call, AssertionError) or "" for name, (call, _) in calls.items()}
    return [name for name, (_, text) in calls.items() if text not in found[name]]


def job_refused() -> dict[str, str]:
    """What two ranks are told, case by case."""
    rank, module, alone = dist.get_rank(), mlp(), dist.new_group([0])
    spectral, other = nn.Linear(4, 4, dtype=torch.complex64), nn.Linear(8, 8 + rank)
    half: dict[str, Any] = {"reduce_buffer_size": 0, "reduce_fp16": True}

    def wrap(module: nn.Module, **options: Any) -> ShardedDataParallel:
        return ShardedDataParallel(module, OSS(module.parameters(), lr=0.1), **options)

    def clip() -> None:
        wrapped = wrap(mlp())  # torch's function knows of parts while a wrapper lives
        next(module.parameters())._fsshard_clip_with = "call the wrapper's own method"
        try:
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        finally:
            del wrapped

    def with_graph() -> None:
        made = mlp()
        first = next(made.parameters())
        first.grad = torch.zeros_like(first).requires_grad_()
        wrap(made)(batch(0))

    calls: dict[str, tuple[Callable[[], Any], type[Exception]]] = {
        "float16": (lambda: wrap(spectral, **half), MisuseError),
        "clip": (clip, FsshardError),
        "mismatch": (lambda: wrap(other), FsshardError),
        "graph": (with_graph, RuntimeError),
    }
    if rank == 0:
        calls["group"] = (lambda: wrap(mlp(), process_group=alone), MisuseError)
    return {name: error_of(call, kind) or "" for name, (call, kind) in calls.items()}


def job_reduce() -> tuple[list[str], bool]:
    """Backwards under no_sync, then reduce()."""
    module, expected = mlp(), mlp()
    wrapped, optimizer = build("ours", module)
    reference, plain = build("ddp", expected)
    for step in range(3):
        for each in (wrapped, reference):
            with each.no_sync():
                loss_of(each, 2 * step).backward()
        with wrapped.no_sync():
            loss_of(wrapped, 2 * step + 1).backward()
        wrapped.reduce()
        loss_of(reference, 2 * step + 1).backward()
        for each in (optimizer, plain):
            each.step()
            each.zero_grad()
    pairs = zip(values(module), values(expected), strict=True)
    differ = [str(i) for i, (a, b) in enumerate(pairs) if not torch.equal(a, b)]
    return differ, "no gradients wait" in str(error_of(wrapped.reduce, AssertionError))


def job_thawed_with_a_mean() -> list[bool]:
    """A layer is frozen with its mean left in ``grad`` at the owner alone, and thawed before a step."""
    module, expected = mlp(), mlp()
    wrapped, optimizer = build("ours", module)
    reference, plain = build("hand", expected)
    for each in (wrapped, reference):
        loss_of(each, 0).backward()
        trainings.after(each)
        each.module[0].requires_grad_(False)
        each(batch(1))
        each.module[0].requires_grad_(True)
    for each in (optimizer, plain):
        each.step()
    return [torch.equal(a, b) for a, b in zip(values(module), values(expected), strict=True)]


def job_evaluated_alone() -> list[bool]:
    """Rank 0 freezes, casts and evaluates the model between steps; nothing to be done under DDP, which would hang."""
    module, expected = mlp(), mlp()
    wrapped, optimizer = build("ours", module)
    reference, plain = build("ddp", expected)
    for step in range(4):
        if dist.get_rank() == 0 and step:
            wrapped.requires_grad_(False)
            wrapped.eval()
            with torch.no_grad():
                wrapped(batch(9))
                if step == 2:
                    module.double()
                    wrapped(batch(9).double())
                    module.float()
            wrapped.requires_grad_(True)
            wrapped.train()
        for each, updates in ((wrapped, optimizer), (reference, plain)):
            loss_of(each, step).backward()
            updates.step()
            updates.zero_grad()
    return [torch.equal(a, b) for a, b in zip(values(module), values(expected), strict=True)]


def job_alone() -> list[bool]:
    """One rank: nothing is reduced, and everything can be called."""
    module, expected = mlp(), mlp()
    wrapped, optimizer = build("ours", module)
    plain = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        with wrapped.no_sync():
            loss_of(wrapped, step).backward()
        wrapped.reduce()
        loss_of(expected, step).backward()
        for each in (optimizer, plain):
            each.step()
            each.zero_grad()
        module[0].requires_grad_(step % 2 == 0)
        expected[0].requires_grad_(step % 2 == 0)
    return [torch.equal(a, b) for a, b in zip(values(module), values(expected), strict=True)]


def job_refreshing() -> dict[str, tuple[int, int]]:
    """(refreshes, warnings) in six forwards with one change."""

    def count(**kw: Any) -> tuple[int, int]:
        module = mlp()
        wrapped, _ = build("ours", module, **kw)
        refreshed = [0]
        original = wrapped.refresh_trainable

        def refresh() -> None:
            refreshed[0] += 1
            original()

        wrapped.refresh_trainable = refresh
        with warnings_of("fsshard") as warned:
            for step in range(6):
                if step == 3:
                    module[0].requires_grad_(False)
                    if kw.get("auto_refresh_trainable") is False:
                        wrapped.refresh_trainable()
                wrapped.zero_grad()
                loss_of(wrapped, step).backward()
        return refreshed[0], sum("have changed" in text for text in warned)

    return {
        "warned": count(),
        "silent": count(warn_on_trainable_params_changed=False),
        "by hand": count(auto_refresh_trainable=False),
    }
