"""A job's specification: what is filled in, what is refused, and by which name."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rest_framework.exceptions import ValidationError

from marketplace.core.errors import drf_exception_handler
from marketplace.training.spec import (
    AUTO_STEPS,
    JobSpecForm,
    artifacts_named,
    auto_sync,
    parameters_of,
    run_of_spec,
)
from worker_agent.protocol import BlobData, GptModel, ModuleModel, UrlData

NOW = datetime(2026, 12, 1, 12, tzinfo=UTC)
GPT = {"kind": "gpt", "n_layer": 2, "n_head": 4, "d_model": 64, "context": 64}
MODULE = {"kind": "module", "entry": "mine:build", "parameters": 1_000}
DIGEST = "a" * 64


def asked(**more: Any) -> dict[str, Any]:
    return {"name": "run", "model": GPT, "tokens": 1_000_000, "budget_uusd": 20_000_000, **more}


def read(data: Any) -> dict[str, Any]:
    form = JobSpecForm(data=data, context={"now": NOW})
    form.is_valid(raise_exception=True)
    return dict(form.validated_data)


def refused(data: Any) -> dict[str, str]:
    """The fields that are refused, as the API names them."""
    with pytest.raises(ValidationError) as caught:
        read(data)
    answer = drf_exception_handler(caught.value, {})
    assert answer is not None
    assert answer.status_code == 422
    return {each["field"]: each["message"] for each in answer.data["fields"]}


def test_what_is_not_said_is_filled_in() -> None:
    spec = read(asked())
    assert spec["data"] == {"kind": "builtin", "name": "python-stdlib", "max_bytes": 4_000_000}
    assert (spec["sync"], spec["min_islands"], spec["max_islands"], spec["seed"]) == ("auto", 1, 8, 1)
    run = run_of_spec(spec, job_id="job_1", blobs={})
    assert isinstance(run.model, GptModel)
    assert (run.job_id, run.sync.codec, run.inner.optimizer, run.outer.optimizer) == (
        "job_1",
        "int4",
        "muon",
        "nesterov",
    )


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"tokens": 0}, "tokens"),
        ({"tokens": "many"}, "tokens"),
        ({"budget_uusd": 9_999}, "budget_uusd"),
        ({"budget_uusd": 1.5}, "budget_uusd"),
        ({"name": ""}, "name"),
        ({"name": "a\x00b"}, "name"),
        ({"model": "gpt"}, "model"),
        ({"model": {"kind": "rnn"}}, "model.kind"),
        ({"model": {**GPT, "layers": 3}}, "model.layers"),
        ({"model": {**GPT, "n_layer": -1}}, "model.n_layer"),
        ({"model": {**GPT, "d_model": 65}}, "model.d_model"),
        ({"model": {**MODULE, "entry": "no function"}}, "model.entry"),
        ({"model": {"kind": "module", "entry": "a:b"}}, "model.parameters"),
        ({"data": {"kind": "url", "url": "http://plain.example/x", "sha256": DIGEST}}, "data.url"),
        ({"data": {"kind": "url", "url": "https://a.example/x", "sha256": "short"}}, "data.sha256"),
        ({"data": {"kind": "artifact"}}, "data.artifact_id"),
        ({"sync": "fast"}, "sync"),
        ({"sync": {"inner_steps": 0}}, "sync.inner_steps"),
        ({"sync": {"inner_steps": 5, "codec": "int2"}}, "sync.codec"),
        ({"sync": {"inner_steps": 5, "colour": 1}}, "sync.colour"),
        ({"inner": {"lr": -1}}, "inner.lr"),
        ({"outer": {"momentum": 1.0}}, "outer.momentum"),
        ({"gpus": {"allowed": []}}, "gpus.allowed"),
        ({"gpus": {"per_island": 0}}, "gpus.per_island"),
        ({"min_islands": 3, "max_islands": 2}, "max_islands"),
        ({"batch_tokens": 32}, "batch_tokens"),
        ({"tokens": 100, "batch_tokens": 4_096}, "tokens"),
        ({"heldout_bytes": 2_000, "eval_bytes": 3_000}, "eval_bytes"),
        ({"deadline_at": (NOW - timedelta(minutes=1)).isoformat()}, "deadline_at"),
        ({"deadline_at": "soon"}, "deadline_at"),
        ({"colour": "blue"}, "colour"),
    ],
)
def test_each_mistake_is_named_by_its_field(more: dict[str, Any], field: str) -> None:
    assert list(refused(asked(**more))) == [field]


def test_all_that_is_missing_is_named_at_once() -> None:
    assert set(refused({})) == {"name", "model", "tokens", "budget_uusd"}


@pytest.mark.parametrize("data", [None, [], "a job", 7])
def test_what_is_no_object_is_refused_as_such(data: Any) -> None:
    assert refused(data)


def test_artifacts_are_named_with_the_field_that_names_them_and_go_into_the_run_by_digest() -> None:
    spec = read(
        asked(model={**MODULE, "artifact_id": "art_code"}, data={"kind": "artifact", "artifact_id": "art_text"})
    )
    assert artifacts_named(spec) == {"art_code": "model.artifact_id", "art_text": "data.artifact_id"}
    run = run_of_spec(spec, job_id="job_1", blobs={"art_code": ("c" * 64, 10), "art_text": ("d" * 64, 20)})
    assert isinstance(run.model, ModuleModel)
    assert run.model.artifact == "c" * 64
    assert run.data == BlobData(digest="d" * 64, size_bytes=20)


def test_a_module_that_is_installed_needs_no_artifact_and_data_may_be_fetched_by_the_islands() -> None:
    url = {"kind": "url", "url": "https://a.example/text", "sha256": DIGEST}
    run = run_of_spec(read(asked(model=MODULE, data=url)), job_id="job_1", blobs={})
    assert isinstance(run.model, ModuleModel)
    assert run.model.artifact is None
    assert run.data == UrlData(url="https://a.example/text", sha256=DIGEST)


@given(tokens=st.integers(1, 10**15), batch_tokens=st.integers(1, 10**9), max_islands=st.integers(1, 10_000))
def test_auto_never_leaves_the_range_of_inner_steps(tokens: int, batch_tokens: int, max_islands: int) -> None:
    sync = auto_sync(tokens=tokens, batch_tokens=batch_tokens, max_islands=max_islands)
    assert AUTO_STEPS[0] <= sync.inner_steps <= AUTO_STEPS[1]
    assert (sync.codec, sync.error_feedback) == ("int4", True)


def test_a_head_of_its_own_is_counted() -> None:
    tied = {**GPT, "vocab_size": 256, "tie_embeddings": True}
    assert parameters_of({**tied, "tie_embeddings": False}) - parameters_of(tied) == 256 * 64
