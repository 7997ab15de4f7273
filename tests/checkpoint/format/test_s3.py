"""Checkpoints on a server that speaks S3, which the test starts, where s3fs and moto are installed."""

from __future__ import annotations

import socket
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fsshard
from tests.models import batch, net, take_step

needs_s3 = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("s3fs", "moto", "flask")),
    reason="s3fs or moto is not installed: `make s3` installs both and runs this",
)
BUCKET = "s3://bucket/run"


def step(model: Any, optimizer: Any) -> None:
    model(batch(dist.get_rank())).square().mean().backward()
    take_step(optimizer)


def job_on_s3(server: dict[str, str], backend: str, saves: bool) -> dict[str, Any]:
    """Train, save or load, train on; return the weights."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.items():
            patch.setenv(name, value)
        model = fsshard.wrap(net(), backend=backend)
        optimizer = fsshard.build_optimizer(model, torch.optim.AdamW, lr=0.1)
        step(model, optimizer)
        if saves:
            fsshard.save(f"{BUCKET}/step-1", model, optimizer)
            fsshard.save(f"{BUCKET}/step-2", model, optimizer)
            fsshard.save(f"{BUCKET}/step-3", model, optimizer, keep=2)
            fsshard.save(f"{BUCKET}/step-3", model, optimizer)
        else:
            assert fsshard.latest(BUCKET) == f"{BUCKET}/step-3"
            fsshard.load(f"{BUCKET}/step-3", model, optimizer, verify=True)
        step(model, optimizer)
        return {key: value.clone() for key, value in model.state_dict().items()}


@needs_s3
def test_a_training_goes_on_from_a_bucket(ranks: Any) -> None:
    import boto3
    from moto.server import ThreadedMotoServer

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
    server.start()
    address = f"http://127.0.0.1:{port}"
    settings = {
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "nothing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": address,
    }
    try:
        client = boto3.client(
            "s3",
            endpoint_url=address,
            region_name="us-east-1",
            aws_access_key_id="nobody",
            aws_secret_access_key="nothing",
        )
        client.create_bucket(Bucket="bucket")
        stayed = ranks.run(job_on_s3, 2, settings, "fsdp2", True)[0]
        moved = ranks.run(job_on_s3, 2, settings, "fairscale", False)[0]
        keys = [found["Key"] for found in client.list_objects_v2(Bucket="bucket")["Contents"]]
    finally:
        server.stop()
    assert all(torch.equal(stayed[key], moved[key]) for key in stayed)
    # Two checkpoints are kept, of each one index and the files of two ranks.
    assert sorted({key.split("/")[1] for key in keys}) == ["step-2", "step-3"]
    assert len(keys) == 6
