"""A customer's own model and own text, uploaded over REST, trained on two islands by real agents, and the checkpoint
fetched by its signed address; with the artifacts on the server's disk, and in an S3 store."""

from __future__ import annotations

import hashlib
import io
import pydoc_data.topics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.numpy import load

from marketplace.devstack.demo.customer import Customer
from marketplace.devstack.demo.story import BUYER, PLANS, SELLER, Story
from marketplace.devstack.demo.voice import Voice
from marketplace.devstack.stack import Stack
from marketplace.devstack.state import StateDir
from tests.servers import s3_server

pytestmark = pytest.mark.prove

MODULE = '''
import torch
from torch import nn
from torch.nn import functional as F


class Bigrams(nn.Module):
    """The next byte from the last two."""

    def __init__(self, width):
        super().__init__()
        self.last = nn.Embedding(256, width)
        self.before = nn.Embedding(256, width)
        self.mix = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, 256, bias=False)

    def forward(self, x):
        before = F.pad(x, (1, 0))[:, :-1]
        return self.out(torch.relu(self.mix(self.last(x) + self.before(before))))


def loss(model, inputs, targets):
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def build(config):
    return Bigrams(config["width"]), loss
'''
WIDTH = 32
PARAMETERS = 2 * 256 * WIDTH + WIDTH * WIDTH + WIDTH * 256


@pytest.fixture(params=["disk", "s3"])
def store(request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    """The variables that name where artifacts are kept."""
    if request.param == "disk":
        yield {}
        return
    with s3_server("artifacts") as url:
        keys = {"S3_ACCESS_KEY_ID": "key", "S3_SECRET_ACCESS_KEY": "secret"}
        yield {"S3_BUCKET": "artifacts", "S3_ENDPOINT_URL": url, **keys}


@pytest.fixture
def story(tmp_path: Path, store: dict[str, str]) -> Iterator[Story]:
    env = {"ARCHIPELAGO_FLEET_SYNC_MS": "1000", **store}
    with Stack(StateDir(tmp_path / "state"), web_port=0, fragile=True, env=env) as stack:
        told = Story(stack, Voice(io.StringIO()), tmp_path / "agents")
        try:
            told.catalogue()
            told.sell(told.sign_up(SELLER, "Northern Islands"), PLANS[1:])
            yield told
        finally:
            told.close()


def upload(buyer: Customer, kind: str, name: str, content: bytes) -> str:
    announced = buyer.post(
        "artifacts",
        {"kind": kind, "name": name, "digest": hashlib.sha256(content).hexdigest(), "size_bytes": len(content)},
    )
    where = announced["upload"]
    sent = httpx.request(where["method"], where["url"], headers=where["headers"], content=content, trust_env=False)
    assert sent.is_success
    assert buyer.get(f"artifacts/{announced['id']}")["stored"]
    return str(announced["id"])


def job_of(buyer: Customer, module_id: str, data_id: str, entry: str) -> dict[str, Any]:
    model = {"kind": "module", "entry": entry, "artifact_id": module_id, "parameters": PARAMETERS, "context": 32}
    job: dict[str, Any] = buyer.post(
        "jobs",
        {
            "name": entry,
            "model": {**model, "config": {"width": WIDTH}},
            "data": {"kind": "artifact", "artifact_id": data_id},
            "tokens": 150_000,
            "batch_tokens": 1024,
            "budget_uusd": 2_000_000,
            "min_islands": 2,
            "max_islands": 2,
            "sync": {"inner_steps": 20, "codec": "int8"},
        },
    )
    return job


def ended(story: Story, buyer: Customer, job_id: str) -> dict[str, Any]:
    over = ("succeeded", "stopped", "cancelled", "failed")
    story.until(lambda: buyer.get(f"jobs/{job_id}")["state"] in over, 120, f"{job_id} ends")
    story.until(lambda: buyer.get(f"jobs/{job_id}")["settled_at"] is not None, 60, f"{job_id} is settled")
    job: dict[str, Any] = buyer.get(f"jobs/{job_id}")
    return job


def test_a_customers_own_model_trains_on_their_own_text_and_their_mistake_costs_little(story: Story) -> None:
    buyer = story.sign_up(BUYER, "Small Model Lab")
    story.top_up(buyer)
    text = "\n".join(str(topic) for topic in pydoc_data.topics.topics.values()).encode()
    module_id = upload(buyer, "module", "bigrams.py", MODULE.encode())
    data_id = upload(buyer, "dataset", "topics of Python's documentation", text)

    job = ended(story, buyer, job_of(buyer, module_id, data_id, "bigrams:build")["id"])
    assert (job["state"], job["reason"]) == ("succeeded", job["reason"])
    assert job["bits_per_byte_last"] < job["bits_per_byte_first"] - 2
    rounds = buyer.get(f"jobs/{job['id']}/metrics")["rounds"]
    assert all(len(each["seats"]) == 2 for each in rounds)
    newest = buyer.get(f"jobs/{job['id']}/artifacts")["results"][0]
    content = httpx.get(newest["url"], trust_env=False).content
    assert hashlib.sha256(content).hexdigest() == newest["digest"]
    assert any("last.weight" in name for name in load(content))

    broken = ended(story, buyer, job_of(buyer, module_id, data_id, "bigrams:no_such_function")["id"])
    assert broken["state"] == "failed"
    assert "no_such_function" in broken["reason"]
    assert broken["spent_uusd"] < 100_000
    assert buyer.get("balance")["held_uusd"] == 0
    story.manage("check_ledger")
