"""Wire messages between the agent, the trainer and the control plane.

Pure data: no I/O, no torch, no Django. The marketplace imports this module and nothing else of the agent.
Invariant: a field is only ever added with a default, never renamed or retyped, within one PROTOCOL_VERSION.

Conventions. Times are integer milliseconds since the Unix epoch, UTC, suffix `_ms`. Money is integer micro-USD,
suffix `_uusd`. Digests are lower-case hex SHA-256. A missing reading is None, never zero.

Paths, all below `/api/agent/v1/`, all POST, all JSON:

    enrol                                 EnrolRequest  -> EnrolReply        (join token in the body)
    sync                                  SyncRequest   -> SyncReply         (Authorization: Bearer <agent credential>)
    training/join                         JoinRequest   -> JoinReply         (Authorization: Bearer <member token>)
    training/poll                         PollRequest   -> PollReply
    training/blobs                        BlobPutRequest -> BlobPutReply
    training/blob-urls                    BlobUrlsRequest -> BlobUrlsReply
    training/submit                       SubmitRequest -> SubmitReply
    training/applied                      AppliedRequest -> Ack
    training/snapshot                     SnapshotRequest -> Ack
    training/leave                        LeaveRequest  -> Ack

An error is a 4xx or 5xx with an ErrorReply. 409 with code `stale_generation` means: another process has taken this
member's place, stop. 410 with code `gone` means: the assignment has ended, stop. 5xx and connection errors: retry.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

PROTOCOL_VERSION = 1

# What a trainer's exit code says (ProcessReport.exit_code); below zero it is the signal that ended it.
EXIT_DONE = 0  # finished, told to stop, or drained
EXIT_ERROR = 1  # a defect or a refusal: the message is on stderr and in the status file
EXIT_STALE = 3  # another process holds this member's place now
EXIT_GONE = 4  # the assignment has ended
EXIT_UNREACHABLE = 5  # the coordinator did not answer for as long as the configured patience
EXIT_SPEC = 6  # what was submitted cannot be trained as it stands, here or anywhere

# A payload (the encoded pseudo-gradient of one member and round) is, little-endian throughout:
#
#     magic   8 bytes, PAYLOAD_MAGIC
#     u32     length of the header in bytes
#     header  JSON: {"codec", "block", "numel", "layout_digest", "job_id", "round", "member_id", "tokens"}
#     body    over the flat fp32 vector of `numel` values, all parameters in named_parameters() order:
#       fp32  numel * 4 bytes
#       bf16  numel * 2 bytes
#       int8  ceil(numel / block) fp16 scales, then ceil(numel / block) * block signed bytes (-127..127)
#       int4  ceil(numel / block) fp16 scales, then half as many bytes as padded values: two's-complement nibbles
#             (-7..7), the even index in the low nibble
#
# and decodes to scale * code in fp32. Padding is zero. `layout_digest` is the SHA-256 of the compact JSON
# [[name, [shape...]], ...]. Both the trainer (torch) and the control plane (numpy) read it.
PAYLOAD_MAGIC = b"ARCHPG1\n"
PAYLOAD_HEADER_MAX_BYTES = 4096
CODEC_BLOCK = 256
CODEC_BLOCK_MAX = 65_536

# How a contribution is judged against the others of its round, by whoever seals it.
NORM_CAP = 1.5  # of the median: above it a contribution is shrunk to it
NORM_LIMIT = 3.0  # of the median: above it a contribution is refused
NORMS_TO_JUDGE = 3  # with fewer there is no telling which one is odd

Digest = str


class Message(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Base of all messages: unknown fields are ignored, so either side may be one version ahead."""


class PayloadHeader(msgspec.Struct, kw_only=True):
    """The JSON at the head of a payload. Nothing in it has a default: all of it is always written."""

    codec: Literal["fp32", "bf16", "int8", "int4"]
    block: int
    numel: int
    layout_digest: Digest
    job_id: str
    round: int
    member_id: str
    tokens: int


# --------------------------------------------------------------------------------------------------------- errors


class FieldProblem(Message):
    field: str
    message: str


class ErrorReply(Message):
    code: str
    message: str
    fields: list[FieldProblem] = []


class Ack(Message):
    ok: bool = True


# ---------------------------------------------------------------------------------------------------------- agent


class GpuReading(Message):
    """One GPU as the driver reports it; `simulated` when the operator asked the agent to pose CPU slots as GPUs."""

    index: int
    name: str
    uuid: str | None = None
    pci_device_id: str | None = None  # "10de:2330"
    vram_mib: int | None = None
    utilisation_pct: int | None = None
    power_w: int | None = None
    temperature_c: int | None = None
    simulated: bool = False


class HostFacts(Message):
    hostname: str
    agent_version: str
    python_version: str
    platform: str
    gpus: list[GpuReading]
    gpu_source: Literal["nvml", "simulated", "absent"] = "absent"
    gpu_note: str = ""  # why there is no reading, in words
    cpu_count: int | None = None
    ram_mib: int | None = None
    disk_free_mib: int | None = None
    torch_version: str | None = None


class EnrolRequest(Message):
    protocol: int
    join_token: str
    facts: HostFacts


class EnrolReply(Message):
    agent_id: str
    island_id: str
    island_name: str
    epoch: int  # one higher at every enrolment of the island: an older holder is fenced off
    credential: str
    server_time_ms: int


class ProcessReport(Message):
    """What the agent sees of the process of one assignment, now. Level-triggered: sent on every sync."""

    assignment_id: str
    generation: int
    state: Literal["starting", "running", "exited", "failed", "unknown"]
    pid: int | None = None
    exit_code: int | None = None
    started_at_ms: int | None = None
    message: str = ""
    log_tail: list[str] = []


class UsageRecord(Message):
    """A cumulative counter, never a delta: replay, reorder and loss are harmless.

    `seq` rises by one per record over the life of the spool (one enrolment epoch). `gpu_ms_total` is the GPU time this
    agent has delivered to the assignment within this epoch, in GPU-milliseconds (elapsed ms times GPUs)."""

    seq: int
    assignment_id: str
    gpu_ms_total: int
    observed_at_ms: int


class SyncRequest(Message):
    protocol: int
    epoch: int
    boot_id: str  # new at every start of the agent process
    beat: int  # rises by one per sync of this boot
    agent_time_ms: int
    draining: bool = False
    facts: HostFacts | None = None  # on the first beat of a boot, and again when they change
    processes: list[ProcessReport] = []
    usage: list[UsageRecord] = []


class TrainOrder(Message):
    job_id: str
    member_id: str
    generation: int
    member_token: str
    nproc: int = 1  # processes on this island (torch.distributed data parallel inside)


class Assignment(Message):
    """One lease the island must serve now. What is not in the list must not run.

    `reserve`: hold the GPUs for the buyer and meter them. `train`: also run the trainer with `train`.
    The agent stops the work by itself at `stop_at_ms` (server clock, see SyncReply.server_time_ms), even when cut off.
    """

    id: str
    generation: int
    kind: Literal["reserve", "train"]
    gpus: int
    start_at_ms: int
    stop_at_ms: int
    train: TrainOrder | None = None
    drain: bool = False  # stop at the next safe point: submit what counts, leave, exit 0


class SyncReply(Message):
    server_time_ms: int
    next_sync_ms: int
    usage_acked_seq: int  # every record up to and including this one is durable: it may be dropped from the spool
    assignments: list[Assignment]
    island_state: str
    credential: str | None = (
        None  # a rotated credential: store it, then use it; the old one works until the new is seen
    )
    want_facts: bool = False
    message: str = ""


# -------------------------------------------------------------------------------------------------------- run spec


class GptModel(Message, tag="gpt", tag_field="kind"):
    """A dense byte- or token-level GPT.

    Parameters are initialised on the CPU from the run's seed, the same everywhere.
    """

    n_layer: int = 4
    n_head: int = 4
    d_model: int = 128
    context: int = 128
    vocab_size: int = 256
    tie_embeddings: bool = True


class ModuleModel(Message, tag="module", tag_field="kind"):
    """A user's own `module:function`; the function gets `config` and returns (model, loss_fn)."""

    entry: str
    artifact: Digest | None = None  # a .py or .zip in the artifact store; None: importable where the trainer runs
    config: dict[str, Any] = {}
    vocab_size: int = 256
    context: int = 128


class BuiltinData(Message, tag="builtin", tag_field="kind"):
    """Text found on any machine: `python-stdlib` is the sources and docstrings of the running interpreter's library."""

    name: Literal["python-stdlib"] = "python-stdlib"
    max_bytes: int = 4_000_000


class BlobData(Message, tag="artifact", tag_field="kind"):
    """Bytes in the artifact store: the last `heldout_bytes` are held out for evaluation."""

    digest: Digest
    size_bytes: int


class UrlData(Message, tag="url", tag_field="kind"):
    url: str
    sha256: Digest


class FilesData(Message, tag="files", tag_field="kind"):
    """A path on the island itself (every island must have the same bytes)."""

    path: str


ModelSpec = GptModel | ModuleModel
DataSpec = BuiltinData | BlobData | UrlData | FilesData


class InnerSpec(Message):
    optimizer: Literal["adamw", "muon"] = "muon"
    lr: float = 0.02  # of the hidden matrices under muon, of all parameters under adamw
    adamw_lr: float = 0.01  # of everything that is not a hidden matrix, under muon
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    warmup_tokens: int = 0
    schedule: Literal["constant", "cosine", "wsd"] = "cosine"
    final_lr_fraction: float = 0.1


class OuterSpec(Message):
    optimizer: Literal["nesterov", "average"] = "nesterov"
    lr: float = 0.7
    momentum: float = 0.6


class SyncSpec(Message):
    inner_steps: int = 30  # H of an island of median speed
    codec: Literal["fp32", "bf16", "int8", "int4"] = "int4"
    error_feedback: bool = True
    quorum: float = 0.5  # share of the expected members that must have submitted before a round may be sealed early
    round_deadline_ms: int = 120_000  # a round is sealed by then with what is there (at least one contribution)
    grace_ms: int = 2_000  # waited for the rest once the quorum is there
    snapshot_every: int = 1  # rounds between full states in the store


class RunSpec(Message):
    """Everything all members of one job must agree on. Immutable once the job has begun."""

    job_id: str
    seed: int
    model: ModelSpec
    data: DataSpec
    tokens: int  # global budget of training tokens; schedules are functions of global sealed tokens
    batch_tokens: int = 4096  # tokens per inner step of one island, all its processes together
    heldout_bytes: int = 65_536
    eval_bytes: int = 65_536
    inner: InnerSpec = msgspec.field(default_factory=InnerSpec)
    outer: OuterSpec = msgspec.field(default_factory=OuterSpec)
    sync: SyncSpec = msgspec.field(default_factory=SyncSpec)
    threads: int | None = None  # torch intra-op threads per process; None leaves torch's choice


# -------------------------------------------------------------------------------------------------- training rounds
#
# S_0 is the state every member builds from the seed. Members of round r start from S_r and submit a pseudo-gradient
# (S_r minus their local parameters). The sealed manifest r turns S_r into S_{r+1} by the same arithmetic everywhere.


class BlobRef(Message):
    digest: Digest
    size_bytes: int


class ManifestEntry(Message):
    """One accepted contribution.

    Its coefficient is `weight * clip / sum(weight)` over the manifest's entries, in order.
    """

    member_id: str
    blob: BlobRef
    weight: int  # tokens
    clip: float = 1.0  # < 1 where the norm was above the cap


class Refusal(Message):
    member_id: str
    reason: str  # not_submitted | late | shape | not_finite | norm | digest | base_state | ...


class Manifest(Message):
    """The sealed outcome of a round: identical for all members, ordered by member id."""

    round: int
    entries: list[ManifestEntry]
    tokens_before: int  # global sealed tokens of rounds < round
    tokens: int  # of this round
    refused: list[Refusal] = []
    base_state_digest: Digest | None = None  # digest of S_round as the accepted members reported it
    evaluate: list[str] = []  # members that evaluate S_{round+1} on the held-out bytes
    snapshot_by: str | None = None  # the member that uploads S_{round+1}


class RoundOrder(Message):
    """What one member is to do in the open round."""

    round: int
    steps: int  # H_i of this member
    tokens_before: int  # global sealed tokens at the round's start: position of schedules
    data_slot: int  # which shard this member reads this round; never given twice within one round
    data_slots: int
    deadline_ms: int  # server clock; submit what is done by then
    # First token of this order's own range of the run's data stream, [data_start, data_start + steps * batch_tokens).
    # The coordinator hands ranges out from one counter, so no window is read twice in an epoch whoever joins, leaves or
    # dies. None: the position is derived from tokens_before and data_slot (exact while all slots do equal steps and
    # none is lost).
    data_start: int | None = None


class JoinRequest(Message):
    generation: int
    instance: str  # random per process start: a reconnect of the same generation with another instance supersedes it
    device: str = "cpu"
    parameters: int | None = None
    layout_digest: Digest | None = None


class JoinReply(Message):
    member_id: str
    run: RunSpec
    server_time_ms: int
    snapshot: BlobRef | None  # None: start from the seed (state 0)
    snapshot_round: int  # the snapshot holds S_{snapshot_round}
    snapshot_state_digest: Digest | None
    manifests: list[Manifest]  # to replay on it, in order: snapshot_round, snapshot_round + 1, ...


class PollRequest(Message):
    """Where the member stands. Level-triggered and idempotent: the answer depends only on the state, not on history."""

    generation: int
    instance: str
    state_round: int  # the member holds S_{state_round}
    state_digest: Digest | None = None
    phase: Literal["ready", "training", "submitted", "final"] = "ready"
    steps_done: int = 0
    tokens_done: int = 0
    step_ms: int | None = None  # median time of an inner step
    parameters: int | None = None
    layout_digest: Digest | None = None


class PollReply(Message):
    """`train`: do `order`. `wait`: nothing yet. `apply`: apply `manifest` (round == state_round). `resync`: join again.
    `finish`: the run has its tokens; evaluate S_{state_round}, upload it as a snapshot, report with phase `final`.
    `stop`: leave and exit 0. While training, `train` with the same order means go on."""

    command: Literal["train", "wait", "apply", "resync", "finish", "stop"]
    server_time_ms: int
    next_poll_ms: int = 250
    order: RoundOrder | None = None
    manifest: Manifest | None = None
    reason: str = ""


class BlobPutRequest(Message):
    digest: Digest
    size_bytes: int


class BlobPutReply(Message):
    """`exists`: the store already has it, send nothing. Otherwise PUT the bytes to `url` with `headers`."""

    exists: bool
    url: str = ""
    headers: dict[str, str] = {}


class BlobUrlsRequest(Message):
    digests: list[Digest]


class BlobUrlsReply(Message):
    urls: dict[Digest, str]


class SubmitRequest(Message):
    generation: int
    instance: str
    round: int
    blob: BlobRef
    tokens: int
    steps: int
    base_state_digest: Digest
    train_loss_nats: float  # mean over the round's tokens
    norm: float
    compute_ms: int
    encode_ms: int = 0
    upload_ms: int = 0


class SubmitReply(Message):
    accepted: bool
    reason: str = ""


class AppliedRequest(Message):
    generation: int
    instance: str
    state_round: int  # now holds S_{state_round}
    state_digest: Digest
    heldout_bits_per_byte: float | None = None
    heldout_bytes: int | None = None
    wait_ms: int = 0
    download_ms: int = 0
    apply_ms: int = 0


class SnapshotRequest(Message):
    generation: int
    instance: str
    state_round: int
    state_digest: Digest
    blob: BlobRef


class LeaveRequest(Message):
    generation: int
    instance: str
    reason: str  # drain | stop | error
    message: str = ""
