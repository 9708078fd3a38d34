"""Any sequence of transfers, of what is pending and of what resolves it, of replays and of what must be refused, one by
one and by sets, against a ledger that a child could keep."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from uuid import UUID

import pytest
from django.db import IntegrityError, connection
from hypothesis import HealthCheck, settings
from hypothesis import Phase as Stage
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule, run_state_machine_as_test

from marketplace.accounts.models import Organisation
from marketplace.billing.invariants import breaches
from marketplace.billing.ledger import Entry, account, post, post_set
from marketplace.billing.models import WITHOUT_FLOOR, AccountKind, LedgerAccount, Normal, Phase, Transfer, TransferKind
from marketplace.core.errors import Conflict, InsufficientFunds
from marketplace.core.ids import fact_id
from tests.machines import RolledBack
from tests.mutants import ledger as mutants

# What each kind of step must have happened at least, or the walk proves nothing of it.
QUOTA = 10
FIRED: Counter[str] = Counter()
# Half of them fit what is there, half do not.
AMOUNT = st.one_of(st.integers(1, 9), st.integers(40, 400))
LITTLE = st.integers(1, 40)
PLACE = st.integers(0, 6)


@dataclass
class Sums:
    """One account, as a child would keep it."""

    debit_normal: bool
    floor: bool
    debits: int = 0
    debits_pending: int = 0
    credits: int = 0
    credits_pending: int = 0

    @property
    def allowed(self) -> bool:
        if self.debit_normal:
            return not self.floor or self.debits >= self.credits + self.credits_pending
        return not self.floor or self.credits >= self.debits + self.debits_pending


@dataclass
class Book:
    accounts: dict[int, Sums] = field(default_factory=dict)
    entries: dict[UUID, Entry] = field(default_factory=dict)
    resolved: set[UUID] = field(default_factory=set)

    def put(self, entry: Entry) -> None:
        debit, credit = self.accounts[entry.debit.pk], self.accounts[entry.credit.pk]
        posted, pended = entry.amount_uusd, 0
        if entry.phase == Phase.PENDING:
            posted, pended = 0, entry.amount_uusd
        elif entry.pending is not None:
            pended = -self.entries[entry.pending].amount_uusd
            posted = entry.amount_uusd if entry.phase == Phase.CONFIRM else 0
            self.resolved.add(entry.pending)
        debit.debits += posted
        debit.debits_pending += pended
        credit.credits += posted
        credit.credits_pending += pended
        self.entries[entry.id] = entry


def poster(by_set: bool) -> Callable[[Sequence[Entry]], int]:
    return post_set if by_set else post


class Ledger(RolledBack):
    @initialize()
    def begins(self) -> None:
        mutants.apply_chosen()
        one, two = (Organisation.objects.create(name=name) for name in ("one", "two"))
        self.places = [
            account(AccountKind.STRIPE_PENDING),
            account(AccountKind.STRIPE_AVAILABLE),
            account(AccountKind.FEE_REVENUE, ref="00"),
            account(AccountKind.BUYER_CASH, one),
            account(AccountKind.BUYER_CASH, two),
            account(AccountKind.SELLER_PAYABLE, one),
            account(AccountKind.ESCROW, one, "lse_1"),
        ]
        self.book = Book({a.pk: Sums(a.normal == Normal.DEBIT, a.kind not in WITHOUT_FLOOR) for a in self.places})
        self.count = 0
        # Something that can be moved, resolved and resolved again is there from the first.
        for place in range(3, 7):
            self.send("comes in", [self.single(0, place, 60)])
        self.send("comes in", [self.single(1, 0, 120)])
        for place, void in ((3, False), (4, True)):
            aside = self.named(self.places[place], self.places[1], 9, Phase.PENDING)
            self.send("is set aside", [aside])
            self.send("is void" if void else "is confirmed", [self.resolving(aside, 9, void)])
        self.send("is set aside", [self.named(self.places[5], self.places[1], 9, Phase.PENDING)])

    # ----------------------------------------------------------------------------------------------------------- steps

    @rule(to=st.integers(3, 6), amount=LITTLE, by_set=st.booleans())
    def money_comes_in(self, to: int, amount: int, by_set: bool) -> None:
        self.send("comes in", [self.single(0, to, amount)], by_set)

    @rule(moves=st.lists(st.tuples(PLACE, PLACE, AMOUNT), min_size=1, max_size=4), by_set=st.booleans())
    def money_moves(self, moves: list[tuple[int, int, int]], by_set: bool) -> None:
        entries = [self.single(debit, credit, amount) for debit, credit, amount in moves if debit != credit]
        if entries:
            self.send("moves by set" if by_set else "moves", entries, by_set)

    @rule(debit=st.integers(3, 6), amount=AMOUNT)
    def money_is_set_aside(self, debit: int, amount: int) -> None:
        self.send("is set aside", [self.named(self.places[debit], self.places[1], amount, Phase.PENDING)])

    @precondition(lambda self: self.pending())
    @rule(data=st.data(), part=st.integers(1, 100), void=st.booleans())
    def what_is_pending_is_resolved(self, data: st.DataObject, part: int, void: bool) -> None:
        of = data.draw(st.sampled_from(self.pending()))
        amount = of.amount_uusd if void else max(1, of.amount_uusd * part // 100)
        self.send("is void" if void else "is confirmed", [self.resolving(of, amount, void)])

    @rule(data=st.data(), void=st.booleans())
    def what_was_resolved_is_resolved_again(self, data: st.DataObject, void: bool) -> None:
        of = self.book.entries[data.draw(st.sampled_from(sorted(self.book.resolved)))]
        self.refused("resolved again", [self.resolving(of, of.amount_uusd, void)], Conflict, InsufficientFunds)

    @rule(data=st.data(), by_set=st.booleans(), more=LITTLE)
    def something_is_posted_again(self, data: st.DataObject, by_set: bool, more: int) -> None:
        entry = self.book.entries[data.draw(st.sampled_from(sorted(self.book.entries)))]
        by_set = by_set and entry.phase == Phase.SINGLE
        FIRED["again by set" if by_set else "again"] += 1
        assert poster(by_set)([entry]) == 0
        self.send("again, with more", [entry, self.single(0, 3, more)], by_set)

    @rule(data=st.data(), by_set=st.booleans())
    def something_else_is_posted_under_its_name(self, data: st.DataObject, by_set: bool) -> None:
        entry = self.book.entries[data.draw(st.sampled_from(sorted(self.book.entries)))]
        by_set = by_set and entry.phase == Phase.SINGLE
        other = replace(entry, amount_uusd=entry.amount_uusd + 1)
        self.refused("another under its name", [self.single(0, 3, 1), other], Conflict, by_set=by_set)

    @precondition(lambda self: self.pending())
    @rule(data=st.data(), void=st.booleans())
    def more_is_resolved_than_was_pending(self, data: st.DataObject, void: bool) -> None:
        of = data.draw(st.sampled_from(self.pending()))
        self.refused("more than was pending", [self.resolving(of, of.amount_uusd + 1, void)], IntegrityError)

    # ------------------------------------------------------------------------------------------------------ what is so

    @invariant()
    def every_balance_is_the_models(self) -> None:
        for row in LedgerAccount.objects.all():
            sums = self.book.accounts[row.pk]
            assert (
                row.debits_posted_uusd,
                row.debits_pending_uusd,
                row.credits_posted_uusd,
                row.credits_pending_uusd,
            ) == (sums.debits, sums.debits_pending, sums.credits, sums.credits_pending), str(row)

    @invariant()
    def every_transfer_is_there_once_and_every_invariant_holds(self) -> None:
        assert set(Transfer.objects.values_list("pk", flat=True)) == set(self.book.entries)
        assert breaches() == []

    # --------------------------------------------------------------------------------------------------------- helpers

    def named(
        self, debit: LedgerAccount, credit: LedgerAccount, amount: int, phase: Phase, pending: UUID | None = None
    ) -> Entry:
        self.count += 1
        name = fact_id("machine", self.count)
        return Entry(name, TransferKind.CORRECTION, debit, credit, amount, "m", phase, pending)

    def single(self, debit: int, credit: int, amount: int) -> Entry:
        return self.named(self.places[debit], self.places[credit], amount, Phase.SINGLE)

    def resolving(self, of: Entry, amount: int, void: bool) -> Entry:
        return self.named(of.debit, of.credit, amount, Phase.VOID if void else Phase.CONFIRM, of.id)

    def pending(self) -> list[Entry]:
        entries = self.book.entries.values()
        return [e for e in entries if e.phase == Phase.PENDING and e.id not in self.book.resolved]

    def send(self, what: str, entries: list[Entry], by_set: bool = False) -> None:
        """Post them, and know before whether there is enough: one after the other, or all at once by a set."""
        after, enough = deepcopy(self.book), True
        for entry in entries:
            if entry.id not in after.entries:
                after.put(entry)
                enough &= by_set or all(after.accounts[a.pk].allowed for a in (entry.debit, entry.credit))
        enough &= all(sums.allowed for sums in after.accounts.values())
        if not enough:
            self.refused(f"{what}, refused", entries, InsufficientFunds, by_set=by_set)
            return
        FIRED[what] += 1
        new = sum(entry.id not in self.book.entries for entry in entries)
        assert poster(by_set)(entries) == new
        self.book = after

    def refused(self, what: str, entries: list[Entry], *errors: type[Exception], by_set: bool = False) -> None:
        FIRED[what] += 1
        with pytest.raises(errors):
            poster(by_set)(entries)


STEPS = (
    "comes in",
    "moves",
    "moves, refused",
    "moves by set",
    "moves by set, refused",
    "is set aside",
    "is set aside, refused",
    "is confirmed",
    "is void",
    "resolved again",
    "again",
    "again by set",
    "another under its name",
    "more than was pending",
)


@pytest.mark.django_db
def test_whatever_is_posted_in_whatever_order_the_ledger_is_what_the_model_is() -> None:
    FIRED.clear()
    mutated = bool(os.environ.get(mutants.VARIABLE))
    stages = [Stage.explicit, Stage.generate] if mutated else list(Stage)  # a bug put there need not be made small
    few = settings(max_examples=80, stateful_step_count=25, suppress_health_check=[HealthCheck.too_slow], phases=stages)
    run_state_machine_as_test(Ledger, settings=few)
    assert {step: FIRED[step] for step in STEPS if FIRED[step] < QUOTA} == {}


@pytest.mark.django_db
@pytest.mark.parametrize("name", list(mutants.MUTANTS))
def test_every_mutant_is_a_change_that_the_database_takes(name: str) -> None:
    def state() -> list[tuple[str, ...]]:
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT pg_get_functiondef(oid) FROM pg_proc WHERE proname LIKE 'ledger_post%'"
                " UNION ALL SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE conrelid::regclass::text"
                " IN ('billing_ledgeraccount', 'billing_transfer') ORDER BY 1"
            )
            return list(cursor.fetchall())

    before = state()
    mutants.MUTANTS[name]()
    assert state() != before
