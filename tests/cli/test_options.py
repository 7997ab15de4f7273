"""Options that several commands have: what they take, and one line for what they do not."""

from __future__ import annotations

import pytest

from fsshard.cli.options import backend_names, check_json_file, check_recipe, meshes, naming_recipe, world_sizes
from fsshard.errors import ConfigurationError, FsshardError, RecipeError


def test_lists_are_split_stripped_and_told_apart() -> None:
    assert backend_names("--backends", None) is None
    assert backend_names("--backends", " fsdp2, ddp,") == ["fsdp2", "ddp"]
    assert world_sizes(["1,2", "2", "8 "]) == [1, 2, 8]


@pytest.mark.parametrize("texts", [[""], ["0"], ["two"], ["1,-2"], ["1.5"], ["²"]])
def test_sizes_that_are_none(texts: list[str]) -> None:
    with pytest.raises(ConfigurationError, match="expected positive whole numbers"):
        world_sizes(texts)


def test_meshes() -> None:
    assert meshes([]) == []
    assert meshes(["data=2, tp=2,", "data=4"]) == [{"data": 2, "tp": 2}, {"data": 4}]
    for text in ["", "data", "=2", "data=", "data=two", "data=-1", "2x2"]:
        with pytest.raises(ConfigurationError, match="expected names and sizes, for example --mesh data=2,tp=2"):
            meshes([text])
    with pytest.raises(ConfigurationError, match="named twice"):
        meshes(["data=2,data=2"])


def test_a_list_without_a_name() -> None:
    with pytest.raises(ConfigurationError, match="--backends ' , ': expected a comma list"):
        backend_names("--backends", " , ")


def test_a_file_that_cannot_be_written_and_stdout() -> None:
    check_json_file(None)
    check_json_file("-")
    with pytest.raises((FsshardError, OSError), match="folder"):
        check_json_file("/no/such/folder/report.json")


def test_an_error_names_its_recipe_once() -> None:
    assert naming_recipe("a:b", ValueError("too few")) == "a:b: too few"
    assert naming_recipe("a:b", ValueError("a:b is no recipe")) == "a:b is no recipe"
    assert naming_recipe("a:b", KeyboardInterrupt()) == "a:b: interrupted"
    assert naming_recipe("a:b", ValueError()) == "a:b: ValueError"


def test_what_a_recipe_raises_is_put_into_words_and_what_it_prints_goes_to_stderr(
    capsys: pytest.CaptureFixture[str],
) -> None:
    check_recipe("tests.cli.test_parity:tiny")
    out, err = capsys.readouterr()
    assert out == "" and "a recipe that talks" in err
    with pytest.raises(RecipeError, match="cannot be made: RuntimeError: no such data set"):
        check_recipe("tests.cli.test_parity:broken")
    with pytest.raises(RecipeError, match="no_such_module"):
        check_recipe("no_such_module:thing")
