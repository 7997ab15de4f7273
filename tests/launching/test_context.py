"""init(): one context, whoever has started the process."""

from __future__ import annotations

import logging
import os
import socket
import threading
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore
from torch.distributed.rendezvous import _create_c10d_store

from fsshard.errors import LaunchError
from fsshard.launching.context import Context, JoinSettings, RankInfo, init, own_store_of, torchrun_rank
from fsshard.launching.processes import launch
from tests.launching.launched import NAMES, ON_LOOPBACK, PATIENCE, listeners, nested
from tests.on_ranks import on_ranks


def test_no_launcher_makes_a_one_rank_group_and_says_so(
    bare: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch.set_num_threads(2)
    with caplog.at_level(logging.INFO, logger="fsshard"):
        ctx = init()
    assert "one-rank group" in caplog.text
    assert ctx == Context(0, 0, 1, 1, torch.device("cpu"), "gloo")
    assert torch.get_num_threads() == 2
    exported = {name: os.environ[name] for name in NAMES}
    assert (exported["RANK"], exported["WORLD_SIZE"], exported["LOCAL_WORLD_SIZE"]) == ("0", "1", "1")
    assert (exported["MASTER_ADDR"], exported["MASTER_PORT"]) == ("127.0.0.1", "0")
    total = torch.ones(2)
    dist.all_reduce(total)
    assert total.tolist() == [1.0, 1.0]

    # A second call finds the group; a notebook may destroy it and begin again, or go on to spawn.
    caplog.clear()
    assert init(threads=1) == ctx
    assert torch.get_num_threads() == 1
    with pytest.raises(LaunchError, match="='nccl', but the process group that exists uses 'gloo'"):
        init(process_group_backend="nccl")
    with pytest.raises(LaunchError, match="nprocs=5000"):
        launch(print, 5000)
    dist.destroy_process_group()
    assert init() == ctx
    # A script started from it inherits what was exported, and is no rank either.
    assert torchrun_rank(exported) is None
    # What is changed afterwards is somebody else's word again, all of it.
    dist.destroy_process_group()
    bare.setenv("WORLD_SIZE", "2")
    with pytest.raises(LaunchError, match="MASTER_PORT=0: expected a port"):
        init()


def test_what_init_refuses(bare: pytest.MonkeyPatch) -> None:
    with pytest.raises(LaunchError, match="needs a CUDA device and none was found"):
        init(process_group_backend="nccl")
    with pytest.raises(LaunchError, match="needs a CUDA device and none was found"):
        init(device="cuda")
    with pytest.raises(LaunchError, match="nccl' moves CUDA tensors only"):
        init(process_group_backend="nccl", device="cpu")
    with pytest.raises(LaunchError, match="device: expected a CPU or a CUDA device"):
        init(device="meta")
    with pytest.raises(LaunchError, match="process_group_backend: expected 'gloo', 'nccl' or None, got 'mpi'"):
        init(process_group_backend="mpi")
    assert not dist.is_initialized()
    assert "RANK" not in os.environ


def test_a_hand_made_environment_of_one(bare: pytest.MonkeyPatch) -> None:
    bare.setenv("RANK", "0")
    bare.setenv("WORLD_SIZE", "1")
    assert init(timeout=timedelta(seconds=30)).world_size == 1
    assert launch(nested, 1, ["here"]) == (0, "here")  # in this process: the environment says that it is a rank
    assert dist.is_initialized()  # and the group stays, as launch() did not make it
    with pytest.raises(LaunchError, match=r"launch\(nprocs=2\), but a job of WORLD_SIZE=1"):
        launch(nested, 2, ("here",))


@on_ranks()
def test_a_group_that_somebody_else_made() -> None:
    for name in NAMES:
        del os.environ[name]
    ctx = init()
    exported = {name: os.environ[name] for name in NAMES[:4]}
    rank = dist.get_rank()
    assert ctx == Context(rank, rank, 2, 2, torch.device("cpu"), "gloo")
    assert list(exported.values()) == [str(rank), str(rank), "2", "2"]


def test_a_rank_that_torchrun_has_started_again_finds_none_of_the_former(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own does (2.13): all starts have one store."""
    launcher = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    place = RankInfo("torchrun", 0, 2, 0, 2, "localhost", launcher.port)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "localhost")  # torch 2.14 takes the launcher's store for its own address only
    monkeypatch.setenv("MASTER_PORT", str(launcher.port))
    settings, seen = JoinSettings.check(None, 60.0, None, None), []
    for start in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", start)
        ours = own_store_of(place, settings)
        raw = _create_c10d_store("localhost", launcher.port, 0, 2, timedelta(seconds=60))
        assert ours is not None
        seen.append([ours.check(["ours"]), raw.check(["raw"])])
        ours.set("ours", "address"), raw.set("raw", "address")
    assert seen == [[False, False], [False, True]]
    assert own_store_of(replace(place, local_world_size=1), settings) is None


@pytest.mark.parametrize(("address", "connected"), [("localhost", ON_LOOPBACK), ("127.0.0.2", "0200007F")])
def test_ranks_of_one_host_meet_where_nobody_else_is(address: str, connected: str, bare: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings, served = JoinSettings.check(None, 60.0, None, None), []
    place = RankInfo("torchrun", 0, 2, 0, 2, address, port)
    serving = threading.Thread(target=lambda: served.append(own_store_of(place, settings)))
    serving.start()  # it waits for all
    store = own_store_of(replace(place, rank=1, local_rank=1), settings)
    serving.join(PATIENCE)
    assert store is not None
    assert listeners(port) == [connected]
    store.set("a", "1")
    assert served[0].get("a") == b"1"
    # As torch does where a process joins twice.
    again = own_store_of(replace(place, world_size=1, local_world_size=1), settings)
    assert again is not None
    assert again.get("a") == b"1"
    assert own_store_of(replace(place, address="node01"), settings) is None


def test_the_port_of_another(bare: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for name, value in {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": port}.items():
            bare.setenv(name, str(value))
        with pytest.raises(dist.DistNetworkError, match="address already in use"):
            init(timeout=20)


def test_a_port_that_accepts_and_says_nothing(bare: pytest.MonkeyPatch) -> None:
    """torch's own (2.13) waits for the first word without a limit."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        port = mute.getsockname()[1]
        mute.detach()  # as long as this process: the thread that is left behind must not read its end
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": port}.items():
        bare.setenv(name, str(value))
    with pytest.raises(LaunchError, match=rf"^rank 1 cannot join the job at .*MASTER_PORT={port} within 0.1 s"):
        init(timeout=0.1)
