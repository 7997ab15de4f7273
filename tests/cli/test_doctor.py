"""Checks what the doctor reports where all is well, and what it says where something is not."""

from __future__ import annotations

import contextlib
import json
from functools import partial
from importlib import metadata
from typing import Any

import pytest
import torch

from fsshard.backends import backend_names
from fsshard.cli import app as cli
from fsshard.cli import doctor
from fsshard.cli.doctor import Diagnosis, Finding
from fsshard.errors import LaunchError, MissingExtra
from fsshard.simulation.machine import machine_of
from fsshard.torch_private import registry


def test_everything_is_tried_on_ranks(ranks: Any) -> None:
    found = {f.name: f for f in doctor._on_ranks(ranks, "cpu", timeout=60)}
    assert set(found) == {"cpu, ranks", *backend_names()}
    assert {name: f.status for name, f in found.items() if f.status != "works"} == {}
    assert found["fsdp2"].text == "on 2 ranks, cpu: a step with real and complex weights" and found["fsdp2"].needed
    assert found["none"].text.startswith("on 1 rank,")


class NoRanks:
    """A pool whose processes do not start."""

    tries = 0

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self.tries += 1
        raise LaunchError("rank 0 did not start within 300 s; is the machine overloaded?")


def test_nothing_is_tried_on_ranks_that_do_not_start() -> None:
    pool = NoRanks()
    (found,) = doctor._on_ranks(pool, "cpu", timeout=1)
    assert pool.tries == 1 and found.status == "fails" and found.needed and "did not start" in found.text


def job_fails(how: str) -> str:
    if how == "missing":
        raise MissingExtra("fairscale", "fairscale", "backend='fairscale'")
    raise RuntimeError("no such transport")


@pytest.mark.parametrize(
    ("how", "status", "text"),
    [("missing", "missing", "pip install 'fsshard[fairscale]'"), ("broken", "fails", "on 2 ranks, cpu: rank")],
)
def test_what_fails_is_a_finding(ranks: Any, how: str, status: str, text: str) -> None:
    found = doctor._tried(ranks, "backends", "ddp", "cpu", 2, 60, job_fails, how)
    assert found.status == status and text in found.text
    assert found.needed == (status == "fails")
    if how == "broken":
        assert found.detail.rstrip().endswith("RuntimeError: no such transport")
    assert ranks.run(doctor._run_backend, 1, "none", "cpu")  # the next one is tried all the same


def test_software_devices_and_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {f.name: f for f in (*doctor._software(), *doctor._devices())}
    assert found["torch"].status == found["gloo"].status == found["cpu, bf16"].status == "works"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # as where the driver is broken
    assert {f.name: f for f in doctor._devices()}["cuda"].status == "note"
    monkeypatch.setattr(torch, "__version__", "2.12.1+cpu")
    (_, _, torch_found, *_) = doctor._software()
    assert torch_found.status == "fails" and torch_found.text == "2.12.1+cpu; supported: <2.16,>=2.13"


def test_extras_are_those_of_the_installed_package(monkeypatch: pytest.MonkeyPatch) -> None:
    extras = {f.name: f for f in doctor._extras()}
    assert set(extras) == set(metadata.metadata("fsshard").get_all("Provides-Extra") or [])
    assert extras["cli"].status == "works"
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "torch-harmonics" else "2.0.0")
    sfno = {f.name: f for f in doctor._extras()}["sfno"]
    assert sfno.status == "missing" and "torch-harmonics<0.9,>=0.8" in sfno.text
    monkeypatch.setattr(metadata, "requires", not_installed)
    monkeypatch.setattr(metadata, "metadata", not_installed)
    assert [f.status for f in doctor._extras()] == ["note"]


def not_installed(name: str) -> Any:
    raise metadata.PackageNotFoundError(name)


def diagnosis(*statuses: str, needed: bool = True) -> Diagnosis:
    findings = [Finding("backends", f"[{n}]", status, "so", "line 1", needed) for n, status in enumerate(statuses)]
    return Diagnosis(tuple(findings))


def test_the_verdict() -> None:
    bad = diagnosis("works", "fails")
    assert not bad.ok and bad.conclusion()[-1] == "training on the CPU does not work: [1]"
    assert diagnosis("fails", needed=False).ok and diagnosis("works", "missing").ok
    assert "\nbackends, [1]:\nline 1" in bad.conclusion()


@pytest.mark.parametrize(("status", "code"), [("works", 0), ("fails", 1)])
def test_the_command(
    status: str, code: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda *, timeout: diagnosis(status))
    assert cli.main(["doctor", "--json", "-", "--timeout", "5"]) == code
    out, err = capfd.readouterr()
    assert json.loads(out) == json.loads(diagnosis(status).to_json()) and json.loads(out)["ok"] == (code == 0)
    assert "training on the CPU" in err
    assert cli.main(["doctor", "--json", "/no/such/folder/file.json"]) == 2


def test_constants_are_measured_and_written(ranks: Any, tmp_path: Any, monkeypatch: Any, capsys: Any) -> None:
    file = tmp_path / "machine.json"
    monkeypatch.setattr(doctor, "measured_machine", partial(machine_of, None))  # what measures has tests of its own
    monkeypatch.setattr(doctor, "RankPool", lambda device: contextlib.nullcontext(ranks))
    seen = []
    run = ranks.run
    monkeypatch.setattr(ranks, "run", lambda *given, timeout: seen.append(timeout) or run(*given, timeout=timeout))
    assert cli.main(["doctor", "--measure", str(file), "--timeout", "200"]) == 0
    assert set(seen) == {200.0}
    assert "a rank sends" in capsys.readouterr().out
    assert machine_of(file, "cpu") == machine_of(None, "cpu")
    assert cli.main(["doctor", "--measure", str(file), "--json", "-"]) == 2
    assert "leave out --json" in capsys.readouterr().err
    assert cli.main(["doctor", "--measure", "/no/such/folder/file.json"]) == 2


def test_private_names_that_are_missing_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    there, gone = (
        registry.Private(area="a", name=name, source="torch/x.py", use="u", otherwise="flying", fallback=False)
        for name in ("torch:Tensor", "torch:_no_such")
    )
    monkeypatch.setattr(doctor, "private_torch", lambda: (there, gone))
    missing, summary = doctor._private_names()
    assert (missing.name, missing.status, missing.text) == ("torch._no_such", "missing", "lost: flying")
    assert (summary.status, summary.text) == ("fails", "1 of 2 are present")
    monkeypatch.setattr(doctor, "private_torch", registry.everything)
    *optional, summary = doctor._private_names()  # what a later torch gives, and what is done without
    assert all(finding.text.startswith("instead: ") for finding in optional)
    assert summary.status == ("note" if optional else "works")
