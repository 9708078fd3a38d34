"""The round loop: everyone ends a round with the same bits, whoever is killed, late, slow, told to go or led astray."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch

from worker_agent.protocol import (
    AppliedRequest,
    BlobData,
    BlobRef,
    JoinRequest,
    LeaveRequest,
    ModuleModel,
    OuterSpec,
    PollRequest,
    RoundOrder,
    RunSpec,
    SubmitRequest,
)
from worker_agent.trainer import codec
from worker_agent.trainer.assemble import assemble
from worker_agent.trainer.distributed import Group
from worker_agent.trainer.errors import BlobMissing, Gone, RequestRefused, SpecError, StaleGeneration
from worker_agent.trainer.exchange import digest_of_file
from worker_agent.trainer.exchange_local import LocalCoordinator, LocalExchange, RoundRecord
from worker_agent.trainer.inner import ComputeOptions
from worker_agent.trainer.learner import Learner
from worker_agent.trainer.train import train


class Clock:
    """Time that passes only when somebody looks at it, a tenth of a second a look, or is told to."""

    def __init__(self, step_s: float = 0.0) -> None:
        self.now = 1000.0
        self.step_s = step_s

    def monotonic(self) -> float:
        self.now += self.step_s
        return self.now

    def ms(self) -> int:
        return round(self.now * 1000)


def learner_of(exchange: LocalExchange, home: Path, **options: object) -> Learner:
    home.mkdir(parents=True, exist_ok=True)
    build = partial(assemble, exchange=exchange, workdir=home, group=Group(), options=ComputeOptions(device="cpu"))
    return Learner(exchange, build, home, **options)  # type: ignore[arg-type]  # passed through


class Crew:
    """Learners in threads; `join` waits for them and raises what one of them raised."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []
        self.outcomes: dict[str, str] = {}
        self._threads: list[threading.Thread] = []

    def start(self, name: str, learner: Learner) -> None:
        def serve() -> None:
            try:
                self.outcomes[name] = learner.run()
            except BaseException as error:
                self.errors.append(error)

        self._threads.append(threading.Thread(target=serve, daemon=True))
        self._threads[-1].start()

    def join(self) -> None:
        limit = time.monotonic() + 60
        while any(thread.is_alive() for thread in self._threads) and not self.errors:
            assert time.monotonic() < limit, "a learner did not end"
            for thread in self._threads:
                thread.join(0.05)
        if self.errors:
            raise self.errors[0]


def with_sync(run: RunSpec, **changes: object) -> RunSpec:
    return msgspec.structs.replace(run, sync=msgspec.structs.replace(run.sync, **changes))


def one_digest_a_round(coordinator: LocalCoordinator) -> bool:
    return all(len(digests) == 1 for digests in coordinator.digests.values())


def test_all_members_hold_the_same_bits_after_every_round(small_run: RunSpec, tmp_path: Path) -> None:
    coordinator = LocalCoordinator(small_run, tmp_path / "store", expected=2)
    crew = Crew()
    for name in ("a", "b"):
        crew.start(name, learner_of(coordinator.admit(name), tmp_path / name))
    crew.join()
    assert crew.outcomes == {"a": "finished", "b": "finished"}
    assert [record.members for record in coordinator.records] == [["a", "b"]] * 4
    assert coordinator.tokens == small_run.tokens
    assert one_digest_a_round(coordinator)
    assert sum(coordinator.digests[4].values()) == 2 + 2  # both reported it on applying and again at the end
    assert coordinator.heldout[4] < coordinator.heldout[0]


def test_the_same_seed_and_roster_give_the_same_bits_and_the_same_loss(small_run: RunSpec) -> None:
    first, second = train(small_run, learners=2), train(small_run, learners=2)
    assert [record.state_digest for record in first.records] == [record.state_digest for record in second.records]
    assert first.heldout_bits_per_byte == second.heldout_bits_per_byte
    assert [record.train_loss_nats for record in first.records] == [record.train_loss_nats for record in second.records]
    other = train(msgspec.structs.replace(small_run, seed=12), learners=2)
    assert other.records[0].state_digest != first.records[0].state_digest


def test_one_worker_with_outer_rate_one_and_no_momentum_is_plain_local_training(
    small_run: RunSpec, tmp_path: Path
) -> None:
    run = msgspec.structs.replace(
        with_sync(small_run, codec="fp32", inner_steps=4), outer=OuterSpec(lr=1.0, momentum=0.0), tokens=16 * 128
    )
    rounds = train(run, learners=1)
    exchange = LocalCoordinator(run, tmp_path / "store").admit("alone")
    island = assemble(run, exchange, tmp_path, Group(), ComputeOptions(device="cpu"))
    order = RoundOrder(round=0, steps=16, tokens_before=0, data_slot=0, data_slots=1, deadline_ms=0, data_start=0)
    work = island.train(order, lambda _progress: True)
    assert len(rounds.records) == 4
    assert work.tokens == rounds.tokens
    assert torch.allclose(rounds.state.params, island.parameters(), atol=1e-4)
    assert island.evaluate() == pytest.approx(rounds.final_bits, abs=1e-3)


def test_a_member_lost_in_the_middle_of_a_round_costs_its_own_work_only(small_run: RunSpec, tmp_path: Path) -> None:
    coordinator = LocalCoordinator(with_sync(small_run, quorum=1.0), tmp_path / "store", expected=2)
    ghost = coordinator.admit("ghost")
    ghost.join(JoinRequest(generation=1, instance=ghost.instance))
    ghost.poll(PollRequest(generation=1, instance=ghost.instance, state_round=0))
    crew = Crew()
    crew.start("a", learner_of(coordinator.admit("a"), tmp_path / "a"))
    with coordinator.changed:
        assert coordinator.changed.wait_for(lambda: bool(coordinator._round and coordinator._round.submissions), 60)
    coordinator.lose("ghost")
    crew.join()
    assert [record.members for record in coordinator.records][:2] == [["a"], ["a"]]
    assert coordinator.manifests[0].refused[0].reason == "not_submitted"
    assert crew.outcomes == {"a": "finished"}


@pytest.mark.parametrize("snapshot_every", [1, 3, 100])
def test_one_that_joins_late_takes_the_last_sealed_state_and_starts_with_the_next_round(
    small_run: RunSpec, tmp_path: Path, snapshot_every: int
) -> None:
    crew = Crew()

    def arrive(record: RoundRecord) -> None:
        if record.round == 1:
            crew.start("late", learner_of(coordinator.admit("late"), tmp_path / "late"))

    run = msgspec.structs.replace(with_sync(small_run, snapshot_every=snapshot_every), tokens=small_run.tokens * 4)
    coordinator = LocalCoordinator(run, tmp_path / "store", expected=1, on_round=arrive)
    crew.start("a", learner_of(coordinator.admit("a"), tmp_path / "a"))
    crew.join()
    rosters = [record.members for record in coordinator.records]
    assert rosters[:2] == [["a"], ["a"]]
    assert ["a", "late"] in rosters
    assert one_digest_a_round(coordinator)


def test_work_is_submitted_by_the_deadline_with_the_steps_that_are_done(small_run: RunSpec, tmp_path: Path) -> None:
    clock = Clock(step_s=0.1)
    run = with_sync(small_run, inner_steps=1000, round_deadline_ms=3000)
    run = msgspec.structs.replace(run, tokens=20 * 128)
    coordinator = LocalCoordinator(run, tmp_path / "store", clock_ms=clock.ms, steps_for=lambda _member, _round: 1000)
    learner = learner_of(coordinator.admit("a"), tmp_path / "a", monotonic=clock.monotonic)
    crew = Crew()
    crew.start("a", learner)
    crew.join()
    assert len(coordinator.records) >= 1
    assert all(0 < record.tokens < 1000 * 128 for record in coordinator.records)
    assert crew.outcomes == {"a": "finished"}


class StopAtStep:
    """Stands in for a signal: asks the learner to drain once so many steps of a round are done."""

    def __init__(self, stop: threading.Event, step: int) -> None:
        self._stop = stop
        self._step = step

    def write(self, state: str, **fields: object) -> None:
        if state == "training" and fields.get("step") == self._step:
            self._stop.set()


@pytest.mark.parametrize(("step", "members"), [(2, ["a", "b"]), (0, ["b"])])
def test_a_drain_submits_what_is_worth_it_and_leaves(
    small_run: RunSpec, tmp_path: Path, step: int, members: list[str]
) -> None:
    coordinator = LocalCoordinator(small_run, tmp_path / "store", expected=2)
    crew, stop = Crew(), threading.Event()
    status = StopAtStep(stop, step)
    crew.start("a", learner_of(coordinator.admit("a"), tmp_path / "a", stop=stop, status=status))
    crew.start("b", learner_of(coordinator.admit("b"), tmp_path / "b"))
    crew.join()
    assert crew.outcomes == {"a": "drained", "b": "finished"}
    assert coordinator.records[0].members == members
    assert all(record.members == ["b"] for record in coordinator.records[1:])
    if "a" in members:
        assert coordinator.manifests[0].entries[0].weight == step * small_run.batch_tokens


@pytest.mark.parametrize(("act", "error"), [("admit", StaleGeneration), ("end", Gone)])
def test_a_member_whose_place_is_taken_or_over_stops_at_its_next_word(
    small_run: RunSpec, tmp_path: Path, act: str, error: type[Exception]
) -> None:
    def interfere(record: RoundRecord) -> None:
        if record.round == 0:
            getattr(coordinator, act)("a")

    coordinator = LocalCoordinator(small_run, tmp_path / "store", on_round=interfere)
    crew = Crew()
    crew.start("a", learner_of(coordinator.admit("a"), tmp_path / "a"))
    with pytest.raises(error):
        crew.join()


def test_a_state_that_drifted_is_given_up_for_the_runs_own(small_run: RunSpec, tmp_path: Path) -> None:
    """One bit of b's state is flipped behind its back: the next poll is answered with resync, and all is equal
    again."""
    coordinator = LocalCoordinator(small_run, tmp_path / "store", expected=2)
    crew = Crew()
    b = learner_of(coordinator.admit("b"), tmp_path / "b")
    joins: list[int] = []
    original_hold, original_join = b._hold, b._join

    def hold(state: object) -> None:
        original_hold(state)  # type: ignore[arg-type]
        if b._held.round == 2 and len(joins) == 1:
            params = b._held.params.clone()
            params[0] += 1
            b.state = dataclasses.replace(b._held, params=params)
            b._digest = b._held.digest()

    def join() -> None:
        joins.append(len(coordinator.manifests))
        original_join()

    b._hold, b._join = hold, join  # type: ignore[method-assign,assignment]
    crew.start("a", learner_of(coordinator.admit("a"), tmp_path / "a"))
    crew.start("b", b)
    crew.join()
    assert len(joins) >= 2
    assert len(coordinator.digests[4]) == 1


OWN_MODULE = """
import torch
def build(config):
    model = torch.nn.Sequential(torch.nn.Embedding(256, config["width"]), torch.nn.Linear(config["width"], 256))
    def loss(model, inputs, targets):
        return torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    return model, loss
"""


def test_a_users_module_and_text_come_from_the_store_and_train(small_run: RunSpec, tmp_path: Path, text: Path) -> None:
    store = tmp_path / "store"
    module = tmp_path / "module.py"
    module.write_text(OWN_MODULE)
    code, data = digest_of_file(module), digest_of_file(text)
    run = msgspec.structs.replace(
        small_run,
        model=ModuleModel(entry="stored_module:build", artifact=code.digest, config={"width": 8}, context=16),
        data=BlobData(digest=data.digest, size_bytes=data.size_bytes),
    )
    coordinator = LocalCoordinator(run, store, expected=2)
    crew = Crew()
    for name in ("a", "b"):
        exchange = coordinator.admit(name)
        exchange.put_blob(module)
        exchange.put_blob(text)
        crew.start(name, learner_of(exchange, tmp_path / name))
    crew.join()
    assert one_digest_a_round(coordinator)
    assert coordinator.heldout[4] < coordinator.heldout[0]


def contribution_of_norm(exchange: LocalExchange, folder: Path, size: float) -> SubmitRequest:
    flat = torch.zeros(4)
    flat[0] = size
    header = codec.header_for(
        "fp32", numel=4, layout_digest="0" * 64, job_id="job", round=0, member_id=exchange.instance, tokens=128
    )
    path = folder / exchange.instance
    path.write_bytes(codec.encode(flat, header))
    return SubmitRequest(
        generation=1,
        instance=exchange.instance,
        round=0,
        blob=exchange.put_blob(path),
        tokens=128,
        steps=1,
        base_state_digest="0" * 64,
        train_loss_nats=1.0,
        norm=size,
        compute_ms=1,
    )


def test_a_large_contribution_is_shrunk_and_a_huge_one_left_out_for_all(small_run: RunSpec, tmp_path: Path) -> None:
    coordinator = LocalCoordinator(with_sync(small_run, quorum=1.0), tmp_path / "store", expected=5)
    sizes = {"a": 1.0, "b": 1.0, "c": 1.0, "large": 2.0, "huge": 4.0}
    exchanges = {name: coordinator.admit(name) for name in sizes}
    for exchange in exchanges.values():
        exchange.join(JoinRequest(generation=1, instance=exchange.instance))
        exchange.poll(PollRequest(generation=1, instance=exchange.instance, state_round=0))
    for name, exchange in exchanges.items():
        assert exchange.submit(contribution_of_norm(exchange, tmp_path, sizes[name])).accepted
    (manifest,) = coordinator.manifests
    assert {entry.member_id: entry.clip for entry in manifest.entries} == {"a": 1.0, "b": 1.0, "c": 1.0, "large": 0.75}
    assert [(refusal.member_id, refusal.reason) for refusal in manifest.refused] == [("huge", "norm")]


class EndingExchange(LocalExchange):
    """The assignment ends between the word to stop and the member's farewell."""

    def leave(self, request: LeaveRequest) -> None:
        raise Gone("the assignment has ended")


def test_leaving_a_place_that_is_gone_is_leaving(small_run: RunSpec, tmp_path: Path) -> None:
    coordinator = LocalCoordinator(small_run, tmp_path / "store")
    given = coordinator.admit("a")
    exchange = EndingExchange(coordinator, "a", generation=given.generation, instance=given.instance)
    assert learner_of(exchange, tmp_path / "a").run() == "finished"


def test_a_vocabulary_too_small_for_bytes_is_refused_by_name(small_run: RunSpec, tmp_path: Path) -> None:
    run = msgspec.structs.replace(small_run, model=msgspec.structs.replace(small_run.model, vocab_size=128))
    exchange = LocalCoordinator(run, tmp_path / "store").admit("a")
    with pytest.raises(SpecError) as caught:
        learner_of(exchange, tmp_path / "a").run()
    assert caught.value.field == "model.vocab_size"


class ForgetfulExchange(LocalExchange):
    """The store has lost a payload, once."""

    forgotten = False

    def get_blobs(self, digests: Sequence[str], folder: Path) -> dict[str, Path]:
        if digests and not self.forgotten:
            self.forgotten = True
            raise BlobMissing("gone")
        return super().get_blobs(digests, folder)


class DoubtingExchange(LocalExchange):
    """The coordinator refuses one report."""

    doubted = False

    def applied(self, request: AppliedRequest) -> None:
        if request.state_round == 2 and not self.doubted:
            self.doubted = True
            raise RequestRefused(422, "invalid", "not the state of round 2")
        super().applied(request)


def test_a_refused_report_leads_to_joining_again(small_run: RunSpec, tmp_path: Path) -> None:
    coordinator = LocalCoordinator(small_run, tmp_path / "store")
    given = coordinator.admit("a")
    exchange = DoubtingExchange(coordinator, "a", generation=given.generation, instance=given.instance)
    crew = Crew()
    crew.start("a", learner_of(exchange, tmp_path / "a"))
    crew.join()
    assert exchange.doubted
    assert crew.outcomes == {"a": "finished"}
    assert one_digest_a_round(coordinator)


def test_a_payload_the_store_has_lost_leads_to_joining_again(small_run: RunSpec, tmp_path: Path) -> None:
    coordinator = LocalCoordinator(small_run, tmp_path / "store")
    given = coordinator.admit("a")
    exchange = ForgetfulExchange(coordinator, "a", generation=given.generation, instance=given.instance)
    crew = Crew()
    crew.start("a", learner_of(exchange, tmp_path / "a"))
    crew.join()
    assert exchange.forgotten
    assert coordinator.finished
    assert one_digest_a_round(coordinator)


def test_a_round_sealed_without_a_member_ends_its_training_at_once(small_run: RunSpec, tmp_path: Path) -> None:
    """`slow` is given a million steps; the other's work is quorum enough, and the seal is noticed while training."""
    run = with_sync(small_run, quorum=0.5, grace_ms=0)
    coordinator = LocalCoordinator(
        run,
        tmp_path / "store",
        expected=2,
        steps_for=lambda member, round: 10**6 if member == "slow" and round == 0 else 4,
    )
    run_without_limit = msgspec.structs.replace(run, tokens=10**9)
    coordinator.run = run_without_limit  # so that the budget does not shorten the order
    crew = Crew()

    def restore(record: RoundRecord) -> None:
        if record.round == 0:
            coordinator.run = run

    coordinator._on_round = restore
    crew.start("fast", learner_of(coordinator.admit("fast"), tmp_path / "fast"))
    crew.start("slow", learner_of(coordinator.admit("slow"), tmp_path / "slow"))
    crew.join()
    assert coordinator.records[0].members == ["fast"]
    assert [(r.member_id, r.reason) for r in coordinator.manifests[0].refused] == [("slow", "not_submitted")]
    assert one_digest_a_round(coordinator)
    assert crew.outcomes == {"fast": "finished", "slow": "finished"}


def test_a_payload_that_is_no_payload_is_refused_for_all_and_counted_against_its_sender(
    small_run: RunSpec, tmp_path: Path
) -> None:
    coordinator = LocalCoordinator(small_run, tmp_path / "store", expected=2)
    liar = coordinator.admit("liar")
    liar.join(JoinRequest(generation=1, instance=liar.instance))
    liar.poll(PollRequest(generation=1, instance=liar.instance, state_round=0))
    crew = Crew()
    crew.start("a", learner_of(coordinator.admit("a"), tmp_path / "a"))
    with coordinator.changed:
        assert coordinator.changed.wait_for(lambda: coordinator._round is not None, 60)
    junk = tmp_path / "junk"
    junk.write_bytes(b"junk")
    reply = liar.submit(
        SubmitRequest(
            generation=1,
            instance=liar.instance,
            round=0,
            blob=liar.put_blob(junk),
            tokens=10,
            steps=1,
            base_state_digest="0" * 64,
            train_loss_nats=1.0,
            norm=1.0,
            compute_ms=1,
        )
    )
    coordinator.lose("liar")
    crew.join()
    assert (reply.accepted, reply.reason) == (False, "header")
    assert [(r.member_id, r.reason) for r in coordinator.manifests[0].refused] == [("liar", "header")]


def test_what_a_refused_round_did_not_carry_is_still_owed(small_run: RunSpec, tmp_path: Path) -> None:
    """The residual moves on only with a manifest that has the payload: otherwise error would be dropped or sent
    twice."""
    coordinator = LocalCoordinator(small_run, tmp_path / "store")
    learner = learner_of(coordinator.admit("a"), tmp_path / "a")
    owed: list[torch.Tensor | None] = []
    original = learner._advance

    def advance(manifest: object) -> None:
        before = learner._residual
        if len(owed) == 1:  # as if the coordinator had taken another payload of the round than ours
            assert learner._submission is not None
            learner._submission = dataclasses.replace(learner._submission, blob=BlobRef(digest="f" * 64, size_bytes=1))
        original(manifest)  # type: ignore[arg-type]
        owed.append(learner._residual)
        if len(owed) == 2:
            assert learner._residual is before

    learner._advance = advance  # type: ignore[method-assign]
    learner.run()
    assert owed[0] is not None
    assert owed[1] is owed[0]
    assert owed[2] is not owed[0]
