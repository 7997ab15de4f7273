"""Whoever names a line to write in an error makes a promise; here is which test keeps it."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
VERBS = (
    "add|build|call|cast|change|choose|compute|give|hand|keep|leave|load|make|move|name|pass|put|run|save|say|see|set|"
    "take|use|wrap|write"
)
ADVICE = re.compile(rf"\b({VERBS})\b[^;]*?(\w=[\w'\[{{(]|\w\(|fsshard\.\w|torch\.\w|`)", re.IGNORECASE)
"""A verb, and within the same part of the sentence a call, an argument, a name of fsshard or torch, or quoted code."""

FOLLOWED: dict[str, str] = {
    "Call optimizer.step() after loss.backward()": "backends/test_ddp.py::test_the_other_ways_to_step_are_right",
    "Keep what it returns, and call that": "backends/test_ddp.py::test_a_return_value_that_is_not_kept_is_named",
    "for a model of fsshard.wrap fsshard.GradScaler": "advice/test_sharded.py::case_loss_scales",
}
"""Part of a message -> the test outside of this folder that does as it says."""

NOT_YET = (
    "call fsshard.parallel.shard_domain(model, mesh['domain']) on",
    "call the parts: self('generator', noise)",
    "leave it out, Accelerate's loaders give all ranks the same n",
    "leave weights='whole', or take a dense weight",
    "name, a dict of fsshard.wrap's arguments with 'backend' amon",
    "or less, or backend='gloo' to run on the CPU",
    "pass fsshard={'device_mesh': ..., 'replicated': ...} (docs/m",
    "pass global_loss_reduction='sum' or 'mean' to Trainer",
    "save keeps MT19937, numpy's own choice: save what you need o",
    "use 'fairscale' or 'ddp', or see_complex=False",
    "use backend='fsdp2' or 'fsdp' on a GPU",
    "use backend='fsdp2', 'fairscale' or 'ddp'",
    "use backend='fsdp2', 'fsdp' or 'ddp', or a size that its mes",
    "use backend='gloo' and device='cpu'",
    "use backend='gloo'",
    "use device='cpu'",
    "use fairscale.nn.checkpoint_wrapper, or torch's checkpoint w",
    "use format='torch'",
    "use format='torch', or convert the model to complex64",
    "use implementation='native' or leave it out, or pass a 1-D m",
    "use mode='max-autotune-no-cudagraphs', or backend='ddp'",
    "wrap(model, backend='fairscale')",
    "wrap(model, backend='none')",
    '": ...} where the backend takes it',
    "); nothing was written. Leave them out of that state_dict, o",
    ", the number of ranks on a node",
    ",), else write a Recipe",
    ". They need the same samples (fsshard.data_rank(mesh) for th",
    "Give fsshard.estimate the settings of fsshard.wrap",
    "Pass trust_pickle=True (--trust-pickle) if you know who wrot",
    "Run a script as python does, where every `import fairscale`,",
    "Set allow_unused=True if this is the desired behavior.",
    "Wrap the frozen modules in their own FullyShardedDataParalle",
    "add data=1",
    "add up to it: replicated={...: mesh[",
    "add up, Split(adds=(",
    "build the optimizer after wrapping, over model.parameters(),",
    "build the optimizer outside of summon_full_params, over mode",
    "build the optimizer over model.parameters() after wrapping",
    "build(), batches(rank, world_size, number) and loss(model, b",
    "call consolidate_state_dict(recipient_rank) on all ranks bef",
    "call fit() again, which makes optimizers anew, or make one o",
    "call fsdp.clip_grad_norm_(max_norm): the FullyShardedDataPar",
    "call fsshard.init() for one rank here",
    "call install() before the first import of fairscale, or run:",
    "call install() before the first process is started",
    "call torch.distributed.init_process_group first",
    "call torch.distributed.init_process_group first, or give pro",
    "call torch.nn.utils.clip_grad_norm_(parameters of this optim",
    "call trainer.model_wrapped.clip_grad_norm_(max_norm)",
    "call uninstall() before it becomes",
    "give OSS(group=) and ShardedDataParallel(process_group=) the",
    "give it a function split(model, mesh) that divides the model",
    "give it a function split(model, mesh), as for fsshard.parity",
    "itself, with DistributedDataParallel",
    "keep its state_dict() (after consolidate_state_dict) and bui",
    "keep the model itself in bfloat16: model.to(torch.bfloat16)",
    "leave compile=False",
    "leave it at True (gather_for_metrics drops what was added),",
    "leave move_grads_to_cpu=None",
    "leave out save_distributed_checkpoint=True",
    "load it with fsshard.load(path, model, optimizer) and save t",
    "load it with fsshard.load, or make it one of ours with `fssh",
    "load its weights by fsshard.load, or make one file of them,",
    "make it with mesh_dim_names=(",
    "make one file of the weights (fsshard export), which module.",
    "make one of it when train() has returned; in a callback, eva",
    "move it to one with model.to(device)",
    "name it in replicated= or sharded=, or pass replicated={():",
    "pass a recipe whose split(model, mesh) makes them, and mesh=",
    "pass cpu=True for ranks on the CPU",
    "pass d=",
    "pass device_mesh=init_device_mesh(device, (replicas, shards)",
    "pass domain.scatter(x)",
    'pass fsshard={"backend": "ddp", "bucket_cap_mb": ...}',
    'pass fsshard={"backend": "ddp", "static_graph": ...}',
    'pass fsshard={"broadcast_buffers": ...}',
    'pass fsshard={"compile": True}, which compiles unit by unit',
    'pass fsshard={"device_mesh": ..., "replicated": ...} (docs/m',
    "pass it as it was before torch.compile",
    "pass names=fsdp_names(model, units) with the wrapped modules",
    "pass nprocs=",
    "pass overwrite=True to replace it",
    "pass overwrite=True to replace it, or choose another path",
    "pass pointwise=(it,)",
    "pass pointwise=(its class,), and if it only contains an oper",
    "pass real=True (--real on the command line)",
    "pass replicated=domain.replicated",
    'pass settings={"compile": True} to from_transformers',
    "pass strict=False if they are the same",
    "pass strict=False)",
    "pass use_distributed=False",
    "pass use_distributed=False, where each rank has all patches",
    "run it on real tensors, as one rank, pass real=True (--real",
    "run the module by validate(), test() or predict()",
    "save copies of them (tensor.clone())",
    "save it as such (tensor.to_dense())",
    "save its state_dict(), or build the module again, wrap it an",
    "save under another name, or take save_distributed_checkpoint",
    "save",
    "say: return loss.full_tensor()",
    "see other samples. If this is meant, name its dimensions mes",
    "set up the model first, or give loaders samplers by fsshard.",
    "set up together with its model, fabric.setup(model, optimize",
    "take it of the slab, domain.scatter(field.detach()).requires",
    "take one of them, such as what fsshard.latest(",
    'under `if __name__ == "__main__":`; and it does not have wha',
    "use accelerate 1.15, or write the loop over fsshard.wrap",
    "use an optimizer that works number by number, such as torch.",
    "use bf16=True",
    "use domain.LpLoss, domain.H1Loss, domain.MSELoss or domain.m",
    'use fsshard.wrap(model, backend="fsdp2"), which takes comple',
    "use reduce_fp16=False",
    "use state_dict() of the wrapper (whole), or local_state_dict",
    "use state_dict()",
    "use the real FairScale: run the script without fsshard.compa",
    "use the state_dict and load_state_dict of what fsshard.wrap",
    "use torch.nn.utils.clip_grad_value_, or one group",
    "use transformers 5.23, or write the loop over fsshard.wrap",
    "wrap it first: model = fsshard.wrap(model, backend=...)",
    "wrap the model with fast_collectives=False",
    "wrap the model with shared_memory=False to send them over TC",
    "wrap the model with shared_memory=False",
    "wrap was told nothing of the others. If they hold parts of t",
    "wrap was told nothing of the others: if they save their part",
    'wrap(model, backend="fsdp2", cpu_offload=True)',
    'wrap, such as {"device_mesh": mesh["data"]}, or a fsshard.pa',
    "wrap`",
    "write a Recipe with the loss alone, or compare two trainings",
    "write the loop over fsshard.wrap with samplers by fsshard.da",
    "write the loop over fsshard.wrap, or use fsshard.compat.ligh",
)
"""Parts of messages whose advice no test follows yet. It gets shorter, never longer."""

NOT_RUN: dict[str, str] = {}
"""Part of a message -> why no test here can do as it says."""


def texts(tree: ast.Module) -> Iterator[str]:
    """The strings of a file but for docstrings; what is put into one is ``{}``."""
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    parts |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield node.value


def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


@functools.cache
def messages() -> dict[str, str]:
    """What the code says with a line to write in it -> the file that says it; what torch_private says is no advice."""
    files = [*(ROOT / "fsshard").rglob("*.py"), *(ROOT / "compat").rglob("*.py")]
    told = [(text, str(file.relative_to(ROOT))) for file in files for text in texts(parsed(file))]
    return {text: file for text, file in told if len(text) > 25 and ADVICE.search(text) and "torch_private" not in file}


@functools.cache
def in_this_folder() -> list[str]:
    found = [
        text
        for file in Path(__file__).parent.glob("test_*.py")
        if file != Path(__file__)
        for text in texts(parsed(file))
    ]
    return [text for text in found if len(text) >= 15]


def test_every_advice_is_followed_by_a_test() -> None:
    known = [*in_this_folder(), *FOLLOWED, *NOT_RUN, *NOT_YET]
    left = [f"{file}: {text}" for text, file in messages().items() if not any(part in text for part in known)]
    assert left == [], "follow each in a test of tests/advice, or name the test that does in FOLLOWED"


def test_what_is_listed_is_there() -> None:
    assert [part for part in (*FOLLOWED, *NOT_RUN, *NOT_YET) if not any(part in text for text in messages())] == []
    for test in FOLLOWED.values():
        file, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), test


def test_advice_is_told_from_other_texts() -> None:
    assert ADVICE.search("no gradient reached it; pass find_unused_parameters=True to fsshard.wrap")
    assert ADVICE.search("use model.state_dict()")
    assert not ADVICE.search("the model has no parameters; there is nothing to shard")
