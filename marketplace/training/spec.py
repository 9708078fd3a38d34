"""What a customer asks for, checked field by field, and the run that all members of the job agree on.

Pure but for the form library. Invariant: a spec that passes here makes a run every trainer accepts; what was not said
is filled in by rules that are stated below, and stands in the stored spec as if it had been said.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any, ClassVar

import msgspec
from drf_spectacular.utils import PolymorphicProxySerializer, extend_schema_field
from rest_framework import serializers

from worker_agent.protocol import (
    BlobData,
    BuiltinData,
    DataSpec,
    GptModel,
    InnerSpec,
    ModelSpec,
    ModuleModel,
    OuterSpec,
    RunSpec,
    SyncSpec,
    UrlData,
)

TOKENS_MAX = 10**14
BUDGET_MAX_UUSD = 10**13
ISLANDS_MAX = 256
SEED_MAX = 2**53 - 1
# Rounds long enough that the exchange is a small part of them, short enough that a lost one costs little: DiLoCo loses
# little quality up to hundreds of inner steps (arXiv 2311.08105, figure 6; 2503.09799, section 4), and a run wants at
# least some dozens of outer steps.
AUTO_ROUNDS = 40
AUTO_STEPS = (10, 500)
MODULE_ENTRY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
SHA256 = re.compile(r"[0-9a-f]{64}")


class GptForm(serializers.Serializer[Any]):
    """A dense GPT of ours, byte-level unless the vocabulary says otherwise."""

    kind = serializers.ChoiceField(choices=["gpt"])
    n_layer = serializers.IntegerField(min_value=1, max_value=200, default=4)
    n_head = serializers.IntegerField(min_value=1, max_value=256, default=4)
    d_model = serializers.IntegerField(min_value=2, max_value=65_536, default=128)
    context = serializers.IntegerField(min_value=8, max_value=131_072, default=128)  # type: ignore[assignment]  # no attribute
    vocab_size = serializers.IntegerField(min_value=2, max_value=1_000_000, default=256)
    tie_embeddings = serializers.BooleanField(default=True)

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        if attrs["d_model"] % (2 * attrs["n_head"]):
            raise serializers.ValidationError({"d_model": "must be a multiple of twice n_head"})
        return attrs


class ModuleForm(serializers.Serializer[Any]):
    """Your own `module:function`, which returns (model, loss function)."""

    kind = serializers.ChoiceField(choices=["module"])
    entry = serializers.CharField(max_length=200, help_text="`module:function`")
    artifact_id = serializers.CharField(
        required=False, allow_null=True, default=None, help_text="The uploaded .py or .zip that holds it."
    )
    config = serializers.DictField(required=False, default=dict, help_text="Given to the function.")
    parameters = serializers.IntegerField(min_value=1, max_value=10**13, help_text="How many it has.")
    vocab_size = serializers.IntegerField(min_value=2, max_value=1_000_000, default=256)
    context = serializers.IntegerField(min_value=8, max_value=131_072, default=128)  # type: ignore[assignment]  # no attribute

    def validate_entry(self, value: str) -> str:
        if not MODULE_ENTRY.fullmatch(value):
            raise serializers.ValidationError("must be `module:function`")
        return value


class BuiltinDataForm(serializers.Serializer[Any]):
    """Text found on any machine: the sources of Python's standard library."""

    kind = serializers.ChoiceField(choices=["builtin"])
    name = serializers.ChoiceField(choices=["python-stdlib"], default="python-stdlib")
    max_bytes = serializers.IntegerField(min_value=100_000, max_value=50_000_000, default=4_000_000)


class ArtifactDataForm(serializers.Serializer[Any]):
    """Bytes you uploaded."""

    kind = serializers.ChoiceField(choices=["artifact"])
    artifact_id = serializers.CharField()


class UrlDataForm(serializers.Serializer[Any]):
    """Bytes the islands fetch themselves, known by their digest."""

    kind = serializers.ChoiceField(choices=["url"])
    url = serializers.URLField(max_length=2000)
    sha256 = serializers.CharField()

    def validate_url(self, value: str) -> str:
        if not value.startswith("https://"):
            raise serializers.ValidationError("must begin with https://")
        return value

    def validate_sha256(self, value: str) -> str:
        if not SHA256.fullmatch(value):
            raise serializers.ValidationError("must be 64 lower-case hexadecimal digits")
        return value


class GpusForm(serializers.Serializer[Any]):
    allowed = serializers.ListField(
        child=serializers.CharField(max_length=40),
        required=False,
        allow_null=True,
        default=None,
        allow_empty=False,
        max_length=100,
        help_text="Canonical GPU ids; null for any.",
    )
    per_island = serializers.IntegerField(required=False, allow_null=True, default=None, min_value=1, max_value=100_000)
    min_vram_gib = serializers.IntegerField(
        required=False, allow_null=True, default=None, min_value=1, max_value=10_000
    )


class SyncForm(serializers.Serializer[Any]):
    inner_steps = serializers.IntegerField(min_value=1, max_value=10_000)
    codec = serializers.ChoiceField(choices=["fp32", "bf16", "int8", "int4"], default="int4")
    error_feedback = serializers.BooleanField(default=True)
    quorum = serializers.FloatField(min_value=0.01, max_value=1.0, default=0.5)
    round_deadline_ms = serializers.IntegerField(min_value=1_000, max_value=86_400_000, default=120_000)
    grace_ms = serializers.IntegerField(min_value=0, max_value=600_000, default=2_000)
    snapshot_every = serializers.IntegerField(min_value=1, max_value=1_000, default=1)


class InnerForm(serializers.Serializer[Any]):
    optimizer = serializers.ChoiceField(choices=["muon", "adamw"], default="muon")
    lr = serializers.FloatField(min_value=1e-8, max_value=10, default=0.02)
    adamw_lr = serializers.FloatField(min_value=1e-8, max_value=10, default=0.01)
    weight_decay = serializers.FloatField(min_value=0, max_value=10, default=0.0)
    grad_clip = serializers.FloatField(min_value=0, max_value=1e6, default=1.0)
    warmup_tokens = serializers.IntegerField(min_value=0, max_value=TOKENS_MAX, default=0)
    schedule = serializers.ChoiceField(choices=["constant", "cosine", "wsd"], default="cosine")
    final_lr_fraction = serializers.FloatField(min_value=0, max_value=1, default=0.1)


class OuterForm(serializers.Serializer[Any]):
    optimizer = serializers.ChoiceField(choices=["nesterov", "average"], default="nesterov")
    lr = serializers.FloatField(min_value=1e-6, max_value=10, default=0.7)
    momentum = serializers.FloatField(min_value=0, max_value=0.999, default=0.6)


class OneOf(serializers.Field[Any, Any, Any, Any]):
    """An object whose `kind` says which form it has; errors carry the field's own path."""

    forms: ClassVar[dict[str, type[serializers.Serializer[Any]]]] = {}

    def to_internal_value(self, data: Any) -> dict[str, Any]:
        if not isinstance(data, dict):
            raise serializers.ValidationError("must be an object")
        kind = data.get("kind")
        if not isinstance(kind, str) or kind not in self.forms:
            raise serializers.ValidationError({"kind": [f"must be one of {', '.join(sorted(self.forms))}"]})
        form = self.forms[kind](data=_known(self.forms[kind](), data), context=self.context)
        form.is_valid(raise_exception=True)
        return dict(form.validated_data)

    def to_representation(self, value: Any) -> Any:
        return value


class AnyModel(OneOf):
    forms: ClassVar = {"gpt": GptForm, "module": ModuleForm}


class AnyData(OneOf):
    forms: ClassVar = {"builtin": BuiltinDataForm, "artifact": ArtifactDataForm, "url": UrlDataForm}


class SyncOrAuto(serializers.Field[Any, Any, Any, Any]):
    """`auto`, or the settings of the rounds."""

    def to_internal_value(self, data: Any) -> Any:
        if data == "auto":
            return data
        if not isinstance(data, dict):
            raise serializers.ValidationError("must be `auto` or an object")
        form = SyncForm(data=_known(SyncForm(), data))
        form.is_valid(raise_exception=True)
        return dict(form.validated_data)

    def to_representation(self, value: Any) -> Any:
        return value


def _shown(name: str, forms: dict[str, type[serializers.Serializer[Any]]]) -> Any:
    return PolymorphicProxySerializer(component_name=name, serializers={**forms}, resource_type_field_name="kind")


extend_schema_field(_shown("ModelSpec", AnyModel.forms))(AnyModel)
extend_schema_field(_shown("DataSpec", AnyData.forms))(AnyData)
extend_schema_field(
    PolymorphicProxySerializer(component_name="SyncSpec", serializers=[SyncForm], resource_type_field_name=None)
)(SyncOrAuto)


class JobSpecForm(serializers.Serializer[Any]):
    """A job as submitted. The only form with required fields: what to train, how much, and for how much money."""

    name = serializers.CharField(max_length=120)
    model = AnyModel()
    data = AnyData(  # type: ignore[assignment]  # no attribute
        default=lambda: {"kind": "builtin", "name": "python-stdlib", "max_bytes": 4_000_000}
    )
    tokens = serializers.IntegerField(min_value=1, max_value=TOKENS_MAX)
    budget_uusd = serializers.IntegerField(
        min_value=10_000, max_value=BUDGET_MAX_UUSD, help_text="Held at once; the job never costs more."
    )
    deadline_at = serializers.DateTimeField(required=False, allow_null=True, default=None)
    min_islands = serializers.IntegerField(min_value=1, max_value=ISLANDS_MAX, default=1)
    max_islands = serializers.IntegerField(min_value=1, max_value=ISLANDS_MAX, default=8)
    gpus = GpusForm(default=lambda: {"allowed": None, "per_island": None, "min_vram_gib": None})
    batch_tokens = serializers.IntegerField(min_value=1, max_value=10**9, default=4096)
    sync = SyncOrAuto(default="auto")
    inner = InnerForm(default=lambda: msgspec.to_builtins(InnerSpec()) or {})
    outer = OuterForm(default=lambda: msgspec.to_builtins(OuterSpec()) or {})
    seed = serializers.IntegerField(min_value=0, max_value=SEED_MAX, default=1)
    heldout_bytes = serializers.IntegerField(min_value=1_024, max_value=10**9, default=65_536)
    eval_bytes = serializers.IntegerField(min_value=1_024, max_value=10**9, default=65_536)
    threads = serializers.IntegerField(
        required=False, allow_null=True, default=None, min_value=1, max_value=1_024, help_text="Of a CPU trainer."
    )

    def to_internal_value(self, data: Any) -> dict[str, Any]:
        return dict(super().to_internal_value(_known(self, data)))

    def validate_name(self, value: str) -> str:
        if not value.isprintable():
            raise serializers.ValidationError("a name has no control characters")
        return " ".join(value.split())

    def validate_deadline_at(self, value: datetime | None) -> datetime | None:
        now: datetime | None = self.context.get("now")
        if value is not None and now is not None and value <= now:
            raise serializers.ValidationError("must be in the future")
        return value

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        if attrs["max_islands"] < attrs["min_islands"]:
            raise serializers.ValidationError({"max_islands": "must not be below min_islands"})
        if attrs["batch_tokens"] < attrs["model"]["context"]:
            raise serializers.ValidationError({"batch_tokens": "must hold at least one context"})
        if attrs["tokens"] < attrs["batch_tokens"]:
            raise serializers.ValidationError({"tokens": "must be at least one batch"})
        if attrs["eval_bytes"] > attrs["heldout_bytes"]:
            raise serializers.ValidationError({"eval_bytes": "must not be more than heldout_bytes"})
        return attrs


def _known(form: serializers.Serializer[Any], data: Any) -> Any:
    """The data, if it has no field the form does not: a misspelt one must not be dropped in silence."""
    if isinstance(data, dict):
        unknown = sorted(str(name) for name in data if name not in form.fields)
        if unknown:
            raise serializers.ValidationError({name: ["there is no such field"] for name in unknown})
    return data


def parameters_of(model: dict[str, Any]) -> int:
    """How many parameters the model has: 12 d^2 a block and the embedding, twice where the head has its own."""
    if model["kind"] == "module":
        return int(model["parameters"])
    tables = 1 if model["tie_embeddings"] else 2
    return int(12 * model["n_layer"] * model["d_model"] ** 2 + tables * model["vocab_size"] * model["d_model"])


def auto_sync(*, tokens: int, batch_tokens: int, max_islands: int) -> SyncSpec:
    """`auto`: so many inner steps that the run has about AUTO_ROUNDS outer ones when all islands it may have take part.

    int4 with error feedback loses nothing that was measurable against fp32 and sends an eighth of it."""
    steps = tokens // (batch_tokens * max_islands * AUTO_ROUNDS)
    return SyncSpec(inner_steps=max(AUTO_STEPS[0], min(AUTO_STEPS[1], steps)))


def run_of_spec(spec: dict[str, Any], *, job_id: str, blobs: dict[str, tuple[str, int]]) -> RunSpec:
    """The run of a checked spec. `blobs` has digest and size of each artifact it names."""
    model: ModelSpec
    data: DataSpec
    asked = spec["model"]
    if asked["kind"] == "gpt":
        model = msgspec.convert({**asked}, GptModel)
    else:
        digest = blobs[asked["artifact_id"]][0] if asked["artifact_id"] else None
        model = ModuleModel(
            entry=asked["entry"],
            artifact=digest,
            config=asked["config"],
            vocab_size=asked["vocab_size"],
            context=asked["context"],
        )
    wanted = spec["data"]
    if wanted["kind"] == "builtin":
        data = BuiltinData(name=wanted["name"], max_bytes=wanted["max_bytes"])
    elif wanted["kind"] == "artifact":
        digest, size_bytes = blobs[wanted["artifact_id"]]
        data = BlobData(digest=digest, size_bytes=size_bytes)
    else:
        data = UrlData(url=wanted["url"], sha256=wanted["sha256"])
    if spec["sync"] == "auto":
        sync = auto_sync(tokens=spec["tokens"], batch_tokens=spec["batch_tokens"], max_islands=spec["max_islands"])
    else:
        sync = msgspec.convert(spec["sync"], SyncSpec)
    return RunSpec(
        job_id=job_id,
        seed=spec["seed"],
        model=model,
        data=data,
        tokens=spec["tokens"],
        batch_tokens=spec["batch_tokens"],
        heldout_bytes=spec["heldout_bytes"],
        eval_bytes=spec["eval_bytes"],
        inner=msgspec.convert(spec["inner"], InnerSpec),
        outer=msgspec.convert(spec["outer"], OuterSpec),
        sync=sync,
        threads=spec["threads"],
    )


def artifacts_named(spec: dict[str, Any]) -> dict[str, str]:
    """The artifacts a spec names, each with the field that does."""
    named = {}
    for field in ("model", "data"):
        artifact_id = spec[field].get("artifact_id")
        if artifact_id:
            named[artifact_id] = f"{field}.artifact_id"
    return named
