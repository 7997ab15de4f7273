"""What is exported of adapters: merged weights, and the layout that PEFT reads."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import fsshard
from fsshard.errors import ConfigurationError
from tests.model.test_lora import ENGINES, KINDS, Net, adam, net, tensors, train
from tests.models import batch, take_step
from tests.on_ranks import on_ranks
from tests.sets import often
from tests.training_runs import differences


def base(kind: str) -> nn.Module:
    """The model of before the adapters."""
    if kind == "net":
        return Net()
    model = KINDS[kind]()
    from neuralop.models import TFNO

    sizes = {"n_modes": (3, 3), "hidden_channels": 4, "in_channels": 1, "out_channels": 1}
    factorization = None if kind == "None" else kind
    model.inner = TFNO(**sizes, factorization=factorization, rank=0.5, n_layers=1, implementation="reconstructed")
    return model


def job_merged(kind: str, folder: str) -> list[str]:
    """The base with the merged weights gives what the adapted model gives, whatever wrote them."""
    found = []
    for number, engine in enumerate(ENGINES):
        model = fsshard.wrap(KINDS[kind](), **engine)
        train(model, range(2), adam(model))
        fsshard.save(f"{folder}/{number}", model)
        fsshard.export(model, f"{folder}/{number}.safetensors", merged=True)
        torch.distributed.barrier()
        fsshard.export(f"{folder}/{number}", f"{folder}/{number}-{torch.distributed.get_rank()}.pt", merged=True)
        model.eval()
        with torch.no_grad():
            want = model(batch(9))
        of_model = load_file(f"{folder}/{number}.safetensors")
        of_checkpoint = torch.load(f"{folder}/{number}-{torch.distributed.get_rank()}.pt")
        plain = base(kind).eval()
        plain.load_state_dict(of_model)
        # B A is a product of matrices elsewhere in memory, by which its last bits are chosen.
        if not torch.allclose(plain(batch(9)), want, rtol=1e-5, atol=1e-6):
            found.append(f"{engine}: off by {(plain(batch(9)) - want).abs().max()}")
        found += differences(dict(sorted(of_model.items())), dict(sorted(of_checkpoint.items())))
    return found


@pytest.mark.parametrize("kind", often(["net", "None", "ComplexTucker"], "net"))
def test_merged_weights_are_those_of_the_model_without_adapters(ranks: Any, tmp_path: Path, kind: str) -> None:
    if kind != "net":
        pytest.importorskip("neuralop")
    assert ranks.run(job_merged, 2, kind, str(tmp_path)) == [[], []]


def real(target: str = "conv|linear") -> nn.Module:
    return net(target)


def job_for_peft(folder: str) -> dict[str, Any]:
    found = {}
    for number, engine in enumerate(ENGINES):
        model = fsshard.wrap(real(), **engine)
        train(model, range(2), adam(model))
        model.eval()
        fsshard.export(model, f"{folder}/{number}", "peft")
        with torch.no_grad():
            found[f"{folder}/{number}"] = model(torch.ones(2, 4)), tensors(model)
    return found


def test_peft_reads_adapters_of_linear_and_convolutional_layers(ranks: Any, tmp_path: Path) -> None:
    """It adds to outputs and not to weights: another order of sums."""
    peft = pytest.importorskip("peft")
    for folder, (want, weights) in ranks.run(job_for_peft, 2, str(tmp_path))[0].items():
        assert sorted(path.name for path in Path(folder).iterdir()) == [
            "adapter_config.json",
            "adapter_model.safetensors",
        ]
        plain = base("net")
        own = {key.replace("_lora.base", ""): value for key, value in weights.items()}
        plain.load_state_dict({key: own[key] for key in plain.state_dict()})
        nn.init.zeros_(plain.head.weight)  # is trained beside, and read of the adapters
        adapted = peft.PeftModel.from_pretrained(plain.eval(), folder)
        assert torch.allclose(adapted(torch.ones(2, 4)), want, rtol=1e-5, atol=1e-6)
        assert all(
            torch.equal(
                adapted.state_dict()[f"base_model.model.head.modules_to_save.default.{name}"], own[f"head.{name}"]
            )
            for name in ("weight", "bias")
        )
        assert torch.allclose(adapted.merge_and_unload()(torch.ones(2, 4)), want, rtol=1e-5, atol=1e-6)


class Encoder(nn.Module):
    """What PEFT adapts by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x))


def by_peft() -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["0", "2"], modules_to_save=["head"], init_lora_weights=False)
    return get_peft_model(Encoder(), config)  # type: ignore[arg-type]


def job_of_peft(folder: str) -> list[str]:
    """Trained by bare replicas, and under each engine."""
    model = by_peft()
    train(model, range(3), adam(model))
    if torch.distributed.get_rank() == 0:
        model.save_pretrained(f"{folder}/bare")
    torch.distributed.barrier()
    want, found = load_file(f"{folder}/bare/adapter_model.safetensors"), []
    for number, engine in enumerate(ENGINES):
        wrapped = fsshard.wrap(by_peft(), **engine)
        train(wrapped, range(3), adam(wrapped))
        fsshard.export(wrapped, f"{folder}/{number}", "peft")
        torch.distributed.barrier()
        found += differences(want, load_file(f"{folder}/{number}/adapter_model.safetensors"))
        with open(f"{folder}/{number}/adapter_config.json") as file, open(f"{folder}/bare/adapter_config.json") as bare:
            found += differences(json.load(bare), json.load(file))
    return found


def test_adapters_of_peft_are_those_of_bare_replicas(ranks: Any, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    assert ranks.run(job_of_peft, 2, str(tmp_path)) == [[], []]


def job_prompts(folder: str, kind: str) -> list[str]:
    """Prompts, which PEFT computes of their encoder's weights when it writes them."""
    import peft
    from transformers import GPT2Config, GPT2LMHeadModel

    def prompted() -> Any:
        torch.manual_seed(0)
        base = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=16, n_embd=8, n_layer=1, n_head=1))
        return peft.get_peft_model(base, getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=5))

    words = torch.arange(6)[None]
    found = []
    for backend in ("ddp", "fsdp", "fsdp2"):
        model = fsshard.wrap(prompted(), backend=backend)
        optimizer = adam(model)
        for _ in range(2):
            model(input_ids=words, labels=words).loss.backward()
            take_step(optimizer)
        fsshard.export(model, f"{folder}/{backend}", "peft")
        torch.distributed.barrier()
        files = [load_file(f"{folder}/{name}/adapter_model.safetensors") for name in ("ddp", backend)]
        assert list(files[0]) == ["prompt_embeddings"]
        found += differences(*files)
    return found


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_prompts_of_peft_are_the_same_under_every_engine(ranks: Any, tmp_path: Path, kind: str) -> None:
    pytest.importorskip("peft")
    pytest.importorskip("transformers")
    assert ranks.run(job_prompts, 2, str(tmp_path), kind) == [[], []]


def job_frozen(folder: str) -> list[str]:
    """What is frozen now (LoRA-FA's lora_A, all), buffers of what is trained beside, and an adapter's name."""
    from peft import LoraConfig, PeftModel, get_peft_model

    found = []
    for number, (engine, frozen, name) in enumerate(
        (({"backend": "fsdp"}, "lora_A", "mine"), ({"backend": "fsdp2"}, "", "default"), ({"backend": "ddp"}, "-", "a"))
    ):
        for kind in ("peft", "lora"):
            torch.manual_seed(0)
            plain = Net()
            plain.spectral.requires_grad_(False)
            if kind == "peft":
                config = LoraConfig(
                    r=2, target_modules=["conv", "linear"], modules_to_save=["norm", "head"], init_lora_weights=False
                )
                model = get_peft_model(copy.deepcopy(plain), config, adapter_name=name)
            else:
                model = fsshard.lora(copy.deepcopy(plain), rank=2, target="conv|linear", alpha=1)
                model.norm.requires_grad_()
                model.head.requires_grad_()
            for key, parameter in model.named_parameters():
                if frozen == "lora_A" and frozen in key:
                    parameter.requires_grad_(False)
            wrapped = fsshard.wrap(model, **engine)
            train(wrapped, range(2), adam(wrapped))
            if kind == "peft" and frozen == "":
                wrapped.module.requires_grad_(False)
            wrapped.eval()
            with torch.no_grad():
                want = wrapped(batch(9))
            fsshard.export(wrapped, f"{folder}/{number}-{kind}", "peft")
            torch.distributed.barrier()
            adapted = PeftModel.from_pretrained(plain, f"{folder}/{number}-{kind}").eval()
            if not torch.allclose(adapted(batch(9)), want, rtol=1e-5, atol=1e-6):
                found.append(f"{kind} {engine}: off by {(adapted(batch(9)) - want).abs().max()}")
    return found if torch.distributed.get_rank() == 0 else []  # whose buffers are written


def test_peft_reads_what_is_frozen_buffers_and_another_name(ranks: Any, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    assert ranks.run(job_frozen, 2, str(tmp_path)) == [[], []]


def job_without_place(folder: str) -> list[str]:
    from peft import LoraConfig

    several = by_peft()
    several.add_adapter("two", LoraConfig(r=2, target_modules=["0"]))
    bias = fsshard.lora(Net(), rank=2, target="conv")
    bias.conv.bias.requires_grad_()
    whole = fsshard.lora(nn.ModuleDict({"head": nn.Linear(4, 4), "xhead": nn.Linear(4, 4)}), rank=2, target="xhead.w")
    whole["head"].requires_grad_()
    told = []
    for number, model in enumerate((several, bias, whole, fsshard.lora(nn.Linear(4, 4), rank=2, target="weight"))):
        wrapped = fsshard.wrap(model, backend="none")
        try:
            fsshard.export(wrapped, f"{folder}/a", "peft")
        except ConfigurationError as error:
            told.append(str(error))
        fsshard.save(f"{folder}/{number}", wrapped, only="trainable")
    inside = nn.Sequential(nn.Linear(4, 4))
    fsshard.export(fsshard.wrap(fsshard.lora(inside, rank=2, target="weight"), backend="none"), f"{folder}/a", "peft")
    return told


def test_what_peft_has_no_place_for_is_named(ranks: Any, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    (told,) = ranks.run(job_without_place, 1, str(tmp_path))
    words = (
        "; use fsshard.save(..., only='trainable')",
        "got conv.bias; use fsshard.save(..., only='trainable'), or merged=True",
        "got head.weight, head.bias; use",
        "got 'weight' of the model itself; put it into nn.Sequential",
    )
    assert all(word in error for word, error in zip(words, told, strict=True)), told


@on_ranks()
def test_what_cannot_be_exported_says_what_can(tmp_path: Path) -> None:
    folder = str(tmp_path)
    model, told = fsshard.wrap(net(), backend="fsdp2"), []
    plain = fsshard.wrap(Net(), backend="fsdp2")
    fsshard.save(f"{folder}/part", model, only="trainable")
    fsshard.save(f"{folder}/whole", model)
    for source, file, settings in (
        (model, "a", {"format": "peft"}),
        (plain, "b", {"format": "peft"}),
        (plain, "c.pt", {"merged": True}),
        (model, "d", {"format": "peft", "merged": True}),
        (f"{folder}/whole", "e", {"format": "peft"}),
        (f"{folder}/part", "f.pt", {"merged": True}),
        (f"{folder}/part", "g.safetensors", {}),
    ):
        try:
            fsshard.export(source, f"{folder}/{file}", **settings)  # type: ignore[arg-type]
        except ConfigurationError as error:
            told.append(str(error))
    assert not {path.name for path in Path(folder).iterdir() if path.is_file()}
    words = (
        "only='trainable'), or merged=True",
        "got none",
        "leave merged= out",
        "merged=True:",
        "load the",
        "Load it",
        "norm.weight, norm.bias. Load it into the wrapped model, and export that",
    )
    assert all(word in error for word, error in zip(words, told, strict=True)), told
