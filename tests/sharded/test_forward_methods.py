"""Methods of the user's model that run under the engine: registered ones, and generate() of transformers."""

from __future__ import annotations

import copy
import itertools
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsshard
from fsshard.errors import ConfigurationError, FsshardError, ModelError, PrecisionError
from fsshard.sharded.forward_methods import explain_forward_error
from tests.models import take_step
from tests.on_ranks import on_backends, on_ranks
from tests.sets import often
from tests.training_runs import DISTRIBUTED

BACKENDS = ["none", *DISTRIBUTED]


class Clip(nn.Module):
    """Two encoders, with parameters of the root's between them; odd sizes, and a complex one."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(4, 3), nn.Linear(4, 3)
        self.logit_scale = nn.Parameter(torch.tensor(1.5))
        self.project = nn.Parameter(torch.randn(3, 3, dtype=torch.complex64))

    def encode_image(self, x: Tensor) -> Tensor:
        return (self.image(x).to(torch.complex64) @ self.project).abs()

    def encode_text(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.text(x) * self.logit_scale * scale

    def forward(self, x: Tensor) -> Tensor:
        return (self.encode_image(x) * self.encode_text(x)).sum(1)

    def loss(self, x: Tensor) -> Tensor:
        return self(x).square().sum()


SAMPLES = torch.arange(8.0).view(2, 4) / 8


def clip() -> Clip:
    torch.manual_seed(0)
    return Clip()


@on_ranks()
def test_a_method_that_calls_the_forward_gathers_as_often() -> None:
    model = fsshard.wrap(clip(), backend="fsdp2")
    fsshard.register_forward_method(model, "loss")
    counts = []
    for loss in (lambda: model(SAMPLES).square().sum(), lambda: model.module.loss(SAMPLES)) * 2:
        with torch.profiler.profile() as profile:
            loss().backward()
        counts.append(sum(event.name == "gloo:broadcast" for event in profile.events()))
    assert counts == [2, 2, 2, 2]


@on_backends(BACKENDS)
def test_registered_methods_are_those_of_the_bare_model(backend: str) -> None:
    """The same samples on all ranks, so that the mean of gradients is the bare model's."""
    bare = clip()
    model, optimizer = fsshard.wrap(
        (module := clip()), torch.optim.SGD(module.parameters(), 0.1), backend=backend, auto_wrap_policy={nn.Linear},
        find_unused_parameters=True,
    )  # fmt: skip
    own = torch.optim.SGD(bare.parameters(), 0.1)
    for name in ("encode_image", "encode_text", "encode_text"):
        fsshard.register_forward_method(model, name)
    found = []
    for _ in range(2):
        for loss in (
            lambda m: m.encode_text(SAMPLES, scale=2.0),
            lambda m: m(SAMPLES),
            lambda m: m.encode_image(SAMPLES),
        ):
            loss(model).square().sum().backward()
            loss(bare).square().sum().backward()
            for each in (optimizer, own):
                take_step(each)
        with torch.no_grad():
            found.append(torch.equal(model.module.encode_text(SAMPLES), bare.encode_text(SAMPLES)))
        with torch.inference_mode():
            found.append(torch.equal(model.encode_image(SAMPLES), bare.encode_image(SAMPLES)))
        state = model.state_dict()
        found += [torch.equal(state[name], value) for name, value in bare.state_dict().items()]
    with model.full_parameters(), torch.no_grad():
        twin = pickle.loads(pickle.dumps(model.module)) if backend in ("none", "ddp") else bare
        model.module.logit_scale.zero_()
        found += [not model.encode_text(SAMPLES).any(), bool(twin.encode_text(SAMPLES).any())]
    assert all(found), found


@on_backends(DISTRIBUTED)
def test_under_mixed_precision_and_as_the_first_forward_within_full_parameters(backend: str) -> None:
    model, other = (
        fsshard.wrap(clip(), backend=backend, mixed_precision="bf16", auto_wrap_policy={nn.Linear}) for _ in range(2)
    )
    fsshard.register_forward_method(model, "encode_text")
    with torch.no_grad(), other.full_parameters():
        whole, text = other.module(SAMPLES), other.module.encode_text(SAMPLES)
    with torch.no_grad():
        assert torch.equal(model.encode_text(SAMPLES), text) and torch.equal(model(SAMPLES), whole)


@on_ranks(1)
def test_what_cannot_be_registered() -> None:
    found = []
    for model, name in ((clip(), "encode_image"), (fsshard.wrap(clip(), backend="none"), "image")):
        with pytest.raises(ConfigurationError) as caught:
            fsshard.register_forward_method(model, name)  # type: ignore[arg-type]
        found.append(str(caught.value))
    bare, module = found
    assert "expected what fsshard.wrap returned, and the name of a method of its model; got Clip and" in bare
    assert "got ShardedModule and 'image'" in module


def job_generate(backend: str) -> list[bool]:
    """One script under every engine, each time as the first forward."""
    from tests.compat.transformers.trainings import gpt2

    def made() -> Any:
        torch.manual_seed(0)
        return gpt2().eval()

    words = torch.arange(1, 4)[None]
    expected = made().generate(words, max_new_tokens=3)
    found = []
    for context in (torch.no_grad, torch.inference_mode):
        for inner in (False, True):
            model = fsshard.wrap(made(), backend=backend)
            with context():
                each = model.module if inner else model
                found.append(torch.equal(each.generate(words, max_new_tokens=3), expected))
            with model.full_parameters():
                found.append(torch.equal(model.generate(words, max_new_tokens=3), expected))
        model = fsshard.wrap(made(), backend=backend)
        with model.full_parameters(), context():
            found.append(torch.equal(model.generate(words, max_new_tokens=3), expected))
            if backend == "fsdp":
                found.append(copy.deepcopy(model.module).generate.__self__ is not model.module)
    loss = model(words, labels=words).loss  # and goes on training
    loss.backward()
    return found


@pytest.mark.parametrize("backend", DISTRIBUTED)
def test_generate_before_during_and_after_full_parameters(ranks: Any, backend: str) -> None:
    pytest.importorskip("transformers")
    for found in ranks.run(job_generate, 2, backend):
        assert all(found), found


def small_t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    ends = {"decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    torch.manual_seed(0)
    return T5ForConditionalGeneration(T5Config(vocab_size=32, **sizes, **ends)).eval()  # type: ignore[arg-type]


def small_gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=32, n_positions=32, n_embd=16, n_layer=2, n_head=2, eos_token_id=1, pad_token_id=0)
    return GPT2LMHeadModel(config).eval()


def job_generate_unevenly(backend: str, build: Any) -> None:
    """Beams, and ranks that end at different times: which blocks are gathered for each token then."""
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block
    from transformers.models.t5.modeling_t5 import T5Block

    units = {"auto_wrap_policy": {T5Block} if build is small_t5 else {GPT2Block}}
    units |= {"merge_below": 0} if backend == "fsdp2" else {}
    rank = torch.distributed.get_rank()
    bare, model = build(), fsshard.wrap(build(), backend=backend, **(units if "fsdp" in backend else {}))
    prompts = torch.randint(2, 32, (2, 5), generator=torch.Generator().manual_seed(rank))
    settings = {"do_sample": False, "attention_mask": torch.ones_like(prompts)}
    for more in ({"max_new_tokens": 3, "num_beams": 2}, {"max_new_tokens": 2 + 4 * rank}):
        expected = bare.generate(prompts, **settings, **more)
        assert torch.equal(model.generate(prompts, **settings, **more), expected)
        with torch.inference_mode():
            assert torch.equal(model.generate(prompts, **settings, **more), expected)
        with model.full_parameters(), torch.inference_mode():
            assert torch.equal(model.generate(prompts, synced_gpus=False, **settings, **more), expected)


@pytest.mark.parametrize(
    ("backend", "build"),
    often(
        itertools.product(DISTRIBUTED, (small_gpt2, small_t5)),
        *(("fsdp2", small_gpt2), ("fairscale", small_gpt2), ("fsdp", small_t5), ("ddp", small_t5)),
    ),
)
def test_generate_where_one_rank_ends_earlier(ranks: Any, backend: str, build: Any) -> None:
    pytest.importorskip("transformers")
    ranks.run(job_generate_unevenly, 4 if backend == "fsdp2" and build is small_gpt2 else 2, backend, build)


TORCH_SAYS = {
    "mat1 and mat2 must have the same dtype, but got Float and BFloat16": PrecisionError,
    "aten.mm.default got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to DTensor": ModelError,
    "Output 0 of _UnitInputsBackward is a view and is being modified inplace.": FsshardError,
}


def backend(param: torch.dtype | None) -> Any:
    return SimpleNamespace(
        name="fsdp2",
        facts=SimpleNamespace(has_dtensors=True),
        settings=SimpleNamespace(precision=SimpleNamespace(param=param)),
    )


@pytest.mark.parametrize("text", TORCH_SAYS)
def test_each_is_explained_by_its_kind(text: str) -> None:
    assert type(explain_forward_error(RuntimeError(text), backend(torch.bfloat16))) is TORCH_SAYS[text]


def test_dtypes_that_differ_in_full_precision_are_the_models_own_affair() -> None:
    said = RuntimeError("mat1 and mat2 must have the same dtype, but got Float and Double")
    assert explain_forward_error(said, backend(None)) is None
    assert explain_forward_error(RuntimeError("out of memory"), backend(torch.bfloat16)) is None
