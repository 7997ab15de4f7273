"""An error that names a line to write makes a promise: each is quoted by a test, which does as it says."""

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

ELSEWHERE = {
    "take URLs, as text": "checkpoint/format/test_object_store.py",
    "pass cpu=True for ranks on the CPU": "advice/test_fronts.py",
    "for a model of fsshard.wrap fsshard.GradScaler": "advice/test_sharded.py",
    "or call fsshard.init() for one rank here": "advice/test_files.py",
    "call fit() again, which creates new optimizers": "compat/lightning/test_strategy.py",
    "return one, or run the module with validate()": "compat/lightning/test_strategy.py",
    "use EMAWeightAveraging or WeightAveraging, or": "compat/lightning/test_strategy.py",
    "call the parts: self('generator', noise)": "compat/lightning/test_strategy.py",
    "call install() before the first import of fairscale, or run:": "compat/test_redirect.py",
    "wrap it first: model = fsshard.wrap(model, backend=...)": "compat/test_neuralop.py",
    "use bf16=True": "compat/transformers/test_trainer.py",
    "Pass trust_pickle=True (--trust-pickle) if you know who wrote it": "checkpoint/interop/test_others.py",
    "pass overwrite=True (--overwrite) to replace it": "checkpoint/interop/test_exporting.py",
    "or a size that its mesh dimension divides": "parallel/test_dtensors.py",
    "register it with persistent=False if it can be made anew": "parallel/test_replicas.py",
    "name it in replicated= or sharded=, or pass replicated={():": "parallel/test_model_mesh.py",
    "give it a function split(model, mesh)": "parity/test_mesh_comparison.py",
    "{} add up to it: replicated={...:": "parity/test_mesh_comparison.py",
    "if the losses of {}'s ranks add up, Split(adds=(": "parity/test_mesh_comparison.py",
    "must return keyword arguments of fsshard.wrap": "parity/test_mesh_comparison.py",
    "use backend='fsdp2' or 'fairscale'": "parity/test_second_derivatives.py",
    "expected a backend's name, a dict of fsshard.wrap's arguments": "parity/test_unusual_recipes.py",
    'under `if __name__ == "__main__":`; and it does not have': "simulation/test_estimating.py",
    "pass real=True (--real on the command line)": "simulation/test_estimating.py",
}
"""Part of a message that no test quotes -> the test file that does as it says."""

NO_ADVICE = (
    "Look for a collective that ranks do not call equally often",
    "equally often: is it under `if rank == 0`",
    "Run a script as python does, where every",
)
"""Parts of messages that name code, and advise nothing but where to look."""
GPU = ("or less, or process_group_backend='gloo' for the CPU", "use device='cpu'")
"""Parts of messages whose advice needs a GPU."""


def texts(tree: ast.Module) -> Iterator[str]:
    """The strings of a file but for docstrings; what is put into one is ``{}``."""
    nodes = list(ast.walk(tree))
    parts = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    parts |= {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield node.value


def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


@functools.cache
def messages() -> dict[str, str]:
    """Map each message of the code that has a line to write to the file that says it; torch_private's are no advice."""
    files = [*(ROOT / "fsshard").rglob("*.py"), *(ROOT / "compat").rglob("*.py")]
    told = [(text, str(file.relative_to(ROOT))) for file in files for text in texts(parsed(file))]
    return {text: file for text, file in told if len(text) > 25 and ADVICE.search(text) and "torch_private" not in file}


@functools.cache
def quoted() -> list[str]:
    """The strings of all tests, those of regular expressions without their backslashes."""
    files = [file for file in (ROOT / "tests").rglob("*.py") if file != Path(__file__)]
    found = [re.sub(r"\\(.)", r"\1", text) for file in files for text in texts(parsed(file))]
    return [text for text in found if len(text) >= 15]


def test_every_advice_is_quoted_by_a_test() -> None:
    together = "\n".join(messages())  # most strings of the tests are in none of them
    known = [part for part in (*quoted(), *ELSEWHERE, *NO_ADVICE, *GPU) if part in together]
    left = [f"{file}: {text}" for text, file in messages().items() if not any(part in text for part in known)]
    assert left == [], "quote each in a test that does as it says, or name that test in ELSEWHERE"


def test_what_is_listed_is_there() -> None:
    listed = [*ELSEWHERE, *NO_ADVICE, *GPU]
    assert [part for part in listed if not any(part in text for text in messages())] == []
    assert [file for file in ELSEWHERE.values() if not (ROOT / "tests" / file).is_file()] == []


def test_advice_is_told_from_other_texts() -> None:
    assert ADVICE.search("no gradient reached it; pass find_unused_parameters=True to fsshard.wrap")
    assert ADVICE.search("use model.state_dict()")
    assert not ADVICE.search("the model has no parameters; there is nothing to shard")
