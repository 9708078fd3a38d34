"""A stateful stand-in for the part of Stripe we use, over real HTTP: `python -m tests.fakes.stripe --port 12111`.

It keeps Stripe's wire: form encoding, bearer keys, `Idempotency-Key`, amounts in cents, a hosted page to pay on, signed
webhooks that are sent again until they are taken. It believes STRIPE_SECRET_KEY, signs with the first of
STRIPE_WEBHOOK_SECRETS and calls STRIPE_WEBHOOK_URL. What a network and a provider do wrong is asked for at `/_control`
(or by `fail_next`, `webhooks`, `release`, `tamper` from Python).
Invariant: one payment a session, one answer an idempotency key, whatever is repeated.
"""

from __future__ import annotations

import argparse
import hashlib
import hmac
import itertools
import json
import os
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import parse_qsl, urlsplit

import httpx

from tests.fakes.stripe_page import onboarding_page, payment_page

RETRY_FIRST_S, RETRY_MOST_S, DELIVERIES_MOST = 0.1, 5.0, 200
SESSION_S = 24 * 3600

Json = dict[str, Any]


@dataclass(frozen=True)
class Answer:
    status: int
    body: Json
    replayed: bool = False


def refusal(status: int, message: str, code: str | None = None, kind: str = "invalid_request_error") -> Answer:
    return Answer(status, {"error": {"type": kind, "code": code, "message": message}})


def nested(pairs: list[tuple[str, str]]) -> Json:
    """`line_items[0][price_data][currency]=usd` as the object it stands for."""
    root: Json = {}
    for name, value in pairs:
        *path, last = name.replace("]", "").split("[")
        place = root
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    return root


@dataclass
class FakeStripe:
    """The books and their server. Use as a context manager in a test, or `serve` in a process of its own."""

    key: str = "sk_test_embedded"
    secret: str = "whsec_embedded"
    webhook_url: str = ""
    port: int = 0
    sessions: dict[str, Json] = field(default_factory=dict)
    intents: dict[str, Json] = field(default_factory=dict)
    balance: dict[str, Json] = field(default_factory=dict)
    accounts: dict[str, Json] = field(default_factory=dict)
    links: dict[str, Json] = field(default_factory=dict)
    transfers: dict[str, Json] = field(default_factory=dict)
    refunds: dict[str, Json] = field(default_factory=dict)
    disputes: dict[str, Json] = field(default_factory=dict)
    events: dict[str, Json] = field(default_factory=dict)
    answers: dict[str, tuple[str, Answer]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    held: list[Json] = field(default_factory=list)
    delivered: list[tuple[str, int]] = field(default_factory=list)  # (event id, status), in the order of the answers
    requests: list[str] = field(default_factory=list)
    mode: str = "deliver"  # deliver | hold | twice
    settles_after_s: float = 0  # a payment is available so long after it was made

    def __post_init__(self) -> None:
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()
        self._closing = threading.Event()
        self._couriers: list[threading.Thread] = []
        handler = type("BoundHandler", (Handler,), {"fake": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", self.port), handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *unused: object) -> None:
        self._closing.set()
        self.server.shutdown()
        self.server.server_close()
        for each in (self._thread, *self._couriers):
            each.join(10)

    # -------------------------------------------------------------------------------------------- what may go wrong

    def fail_next(self, *how: str) -> None:
        """For the next calls, in order: "429", "500" (nothing is done) or "drop" (it is done, and nobody hears)."""
        self.faults += how

    def webhooks(self, mode: str) -> None:
        """ "deliver" at once, "hold" until `release`, or "twice"."""
        self.mode = mode

    def release(self) -> None:
        with self._lock:
            late, self.held = self.held, []
        for event in late:
            self._send(event)

    def tamper(self, session_id: str, cents: int) -> None:
        """Another amount than was asked for, as after a mistake in somebody's dashboard."""
        self.sessions[session_id]["amount_total"] = cents

    def dispute(self, intent_id: str) -> str:
        """A card's holder says that they did not pay: the bank takes the money at once."""
        with self._lock:
            intent, name = self.intents[intent_id], self._name("du")
            self.disputes[name] = {
                "id": name,
                "object": "dispute",
                "amount": intent["amount"],
                "currency": "usd",
                "payment_intent": intent_id,
                "charge": intent["latest_charge"],
                "status": "needs_response",
                "created": int(time.time()),
            }
            self._book("adjustment", name, -intent["amount"], 0)
            self._tell("charge.dispute.created", self.disputes[name])
            return name

    def decide(self, dispute_id: str, won: bool) -> None:
        with self._lock:
            dispute = self.disputes[dispute_id]
            dispute["status"] = "won" if won else "lost"
            if won:
                self._book("adjustment", dispute_id, dispute["amount"], 0)
            self._tell("charge.dispute.closed", dispute)

    def reverse(self, transfer_id: str, cents: int) -> None:
        """Take a part of a transfer back from its seller."""
        with self._lock:
            transfer = self.transfers[transfer_id]
            transfer["amount_reversed"] += cents
            transfer["reversed"] = transfer["amount_reversed"] == transfer["amount"]
            self._book("transfer_refund", transfer_id, cents, 0)
            self._tell("transfer.reversed", transfer)

    # ------------------------------------------------------------------------------------------------------- the API

    def call(self, method: str, path: str, query: Json, form: Json, key: str, idempotency_key: str) -> Answer:
        with self._lock:
            self.requests.append(f"{method} {path}")
            if key != self.key:
                return refusal(401, "Invalid API Key provided.")
            fault = self.faults.pop(0) if self.faults else ""
            if fault == "429":
                return refusal(429, "Too many requests.", "rate_limit")
            if fault == "500":
                return refusal(500, "An unknown error occurred.", kind="api_error")
            print_of = f"{path}\x1f{json.dumps(form, sort_keys=True)}"
            if method == "POST" and idempotency_key in self.answers:
                known_print, known = self.answers[idempotency_key]
                if known_print != print_of:
                    return refusal(
                        400,
                        "Keys for idempotent requests can only be used with the same parameters they were first used"
                        f" with. Try using a key other than '{idempotency_key}' if you meant to execute a different"
                        " request.",
                        kind="idempotency_error",
                    )
                return Answer(0, {}) if fault == "drop" else Answer(known.status, known.body, replayed=True)
            answer = self._route(method, path.removeprefix("/v1/").split("/"), query, form)
            if method == "POST" and idempotency_key:
                self.answers[idempotency_key] = (print_of, Answer(answer.status, json.loads(json.dumps(answer.body))))
            return Answer(0, {}) if fault == "drop" else answer

    def _route(self, method: str, parts: list[str], query: Json, form: Json) -> Answer:
        self._ripen()
        match method, parts:
            case "POST", ["checkout", "sessions"]:
                return self._create_session(form)
            case "GET", ["checkout", "sessions", name]:
                self._expire_if_late(name)
                return self._found(self.sessions, name, "checkout.session")
            case "POST", ["checkout", "sessions", name, "expire"] if name in self.sessions:
                return self._expire(name)
            case "GET", ["payment_intents", name]:
                return self._payment(name, query)
            case "POST", ["accounts"]:
                return self._create_account(form)
            case "GET", ["accounts", name]:
                return self._found(self.accounts, name, "account")
            case "POST", ["account_links"]:
                return self._create_link(form)
            case "POST", ["transfers"]:
                return self._create_transfer(form)
            case "GET", ["transfers"]:
                group = query.get("transfer_group")
                rows = {key: row for key, row in self.transfers.items() if group in (None, row["transfer_group"])}
                return self._list(rows, "/v1/transfers", query)
            case "GET", ["transfers", name]:
                return self._found(self.transfers, name, "transfer")
            case "POST", ["refunds"]:
                return self._create_refund(form)
            case "GET", ["refunds"]:
                intent = query.get("payment_intent")
                rows = {key: row for key, row in self.refunds.items() if intent in (None, row["payment_intent"])}
                return self._list(rows, "/v1/refunds", query)
            case "GET", ["refunds", name]:
                return self._found(self.refunds, name, "refund")
            case "GET", ["disputes", name]:
                return self._found(self.disputes, name, "dispute")
            case "GET", ["balance"]:
                return Answer(200, self._funds())
            case "GET", ["events", name]:
                return self._found(self.events, name, "event")
            case "GET", ["events"]:
                return self._list(self.events, "/v1/events", query)
            case "GET", ["balance_transactions", name]:
                return self._found(self.balance, name, "balance_transaction")
            case "GET", ["balance_transactions"]:
                return self._list(self.balance, "/v1/balance_transactions", query)
        return refusal(404, f"Unrecognized request URL ({method}: /v1/{'/'.join(parts)}).")

    def _found(self, table: dict[str, Json], name: str, kind: str) -> Answer:
        if name not in table:
            return refusal(404, f"No such {kind}: '{name}'", "resource_missing")
        return Answer(200, table[name])

    def _list(self, table: dict[str, Json], url: str, query: Json) -> Answer:
        limit = min(int(query.get("limit", 10)), 100)
        newest = list(reversed(table.values()))
        after = query.get("starting_after")
        if after:
            newest = newest[[row["id"] for row in newest].index(after) + 1 :]
        return Answer(200, {"object": "list", "url": url, "has_more": len(newest) > limit, "data": newest[:limit]})

    def _create_session(self, form: Json) -> Answer:
        lines = form.get("line_items", {}).values()
        wanted = ("mode", "success_url")
        missing = [name for name in wanted if not form.get(name)] + ([] if lines else ["line_items"])
        if missing:
            return refusal(400, f"Missing required param: {missing[0]}.", "parameter_missing")
        cents = sum(int(line["price_data"]["unit_amount"]) * int(line.get("quantity", 1)) for line in lines)
        if cents < 50:
            return refusal(400, "The Checkout Session's total amount must be at least $0.50 usd.", "amount_too_small")
        now_s = int(time.time())
        name = self._name("cs_test")
        self.sessions[name] = {
            "id": name,
            "object": "checkout.session",
            "livemode": False,
            "mode": form["mode"],
            "status": "open",
            "payment_status": "unpaid",
            "amount_subtotal": cents,
            "amount_total": cents,
            "currency": next(iter(lines))["price_data"]["currency"],
            "client_reference_id": form.get("client_reference_id"),
            "metadata": form.get("metadata", {}),
            "payment_intent": None,
            "success_url": form["success_url"],
            "cancel_url": form.get("cancel_url"),
            "created": now_s,
            "expires_at": int(form.get("expires_at", now_s + SESSION_S)),
            "url": f"{self.url}/c/pay/{name}",
            # Of the payment to be made; the real object keeps it out of sight.
            "_payment_metadata": form.get("payment_intent_data", {}).get("metadata", {}),
        }
        return Answer(200, self.sessions[name])

    def _expire_if_late(self, name: str) -> None:
        session = self.sessions.get(name)
        if session and session["status"] == "open" and session["expires_at"] < time.time():
            self._expire(name)

    def _expire(self, name: str) -> Answer:
        session = self.sessions[name]
        if session["status"] != "open":
            return refusal(400, f'Only Checkout Sessions with a status in ["open"] can be expired: {name}.')
        session.update(status="expired", url=None)
        self._tell("checkout.session.expired", session)
        return Answer(200, session)

    # ------------------------------------------------------------------------------------------------ the payment page

    def page(self, name: str, problem: str = "") -> tuple[int, str]:
        with self._lock:
            self._expire_if_late(name)
            return payment_page(self.sessions.get(name), problem)

    def press(self, name: str, button: str) -> str | None:
        """What a person does on the page; where it takes them, or None when there is nothing to pay."""
        with self._lock:
            self._expire_if_late(name)
            session = self.sessions.get(name)
            if session is None or session["status"] != "open":
                return None
            intent = self._intent(session)
            if button != "pay":
                intent["status"] = "requires_payment_method"
                intent["last_payment_error"] = {
                    "type": "card_error",
                    "code": "card_declined",
                    "message": "Your card was declined.",
                }
                self._tell("payment_intent.payment_failed", intent)
                return str(session["cancel_url"] or session["success_url"])
            cents = session["amount_total"]
            charge = self._name("ch")
            intent.update(status="succeeded", amount=cents, amount_received=cents, latest_charge=charge)
            intent["last_payment_error"] = None
            self._book("charge", charge, cents, cents * 29 // 1000 + 30, self.settles_after_s)
            session.update(status="complete", payment_status="paid", url=None)
            self._tell("payment_intent.succeeded", intent)
            self._tell("checkout.session.completed", session)
            return str(session["success_url"]).replace("{CHECKOUT_SESSION_ID}", name)

    def _intent(self, session: Json) -> Json:
        """The session's payment: made when it is first tried, and kept."""
        if session["payment_intent"] is None:
            name = self._name("pi")
            session["payment_intent"] = name
            self.intents[name] = {
                "id": name,
                "object": "payment_intent",
                "livemode": False,
                "status": "requires_payment_method",
                "amount": session["amount_total"],
                "amount_received": 0,
                "currency": session["currency"],
                "metadata": session["_payment_metadata"],
                "last_payment_error": None,
                "latest_charge": None,
                "created": int(time.time()),
            }
        return self.intents[session["payment_intent"]]

    # ------------------------------------------------------------------------------------- balance, sellers, money out

    def _book(self, kind: str, source: str, cents: int, fee: int, after_s: float = 0) -> None:
        moved = self._name("txn")
        self.balance[moved] = {
            "id": moved,
            "object": "balance_transaction",
            "type": kind,
            "source": source,
            "amount": cents,
            "fee": fee,
            "net": cents - fee,
            "currency": "usd",
            "status": "pending" if after_s else "available",
            "available_on": int(time.time() + after_s),
            "created": int(time.time()),
        }

    def _ripen(self) -> None:
        for row in self.balance.values():
            if row["status"] == "pending" and row["available_on"] <= time.time():
                row["status"] = "available"

    def _funds(self) -> Json:
        def of(status: str) -> list[Json]:
            cents = sum(row["net"] for row in self.balance.values() if row["status"] == status)
            return [{"amount": cents, "currency": "usd", "source_types": {"card": cents}}]

        return {"object": "balance", "livemode": False, "available": of("available"), "pending": of("pending")}

    def _payment(self, name: str, query: Json) -> Answer:
        found = self._found(self.intents, name, "payment_intent")
        wanted = query.get("expand", {}).values()
        if found.status != 200 or "latest_charge.balance_transaction" not in wanted:
            return found
        charge = found.body["latest_charge"]
        moved = next((row for row in self.balance.values() if row["source"] == charge), None)
        whole = {"id": charge, "object": "charge", "amount": found.body["amount"], "balance_transaction": moved}
        return Answer(200, {**found.body, "latest_charge": whole if charge else None})

    def _create_account(self, form: Json) -> Answer:
        if form.get("type") != "express":
            return refusal(400, "Invalid type: must be one of custom, express, or standard.", "parameter_invalid")
        name = self._name("acct")
        self.accounts[name] = {
            "id": name,
            "object": "account",
            "type": "express",
            "details_submitted": False,
            "charges_enabled": False,
            "payouts_enabled": False,
            "metadata": form.get("metadata", {}),
            "requirements": {"currently_due": ["individual.first_name", "external_account"], "errors": []},
            "created": int(time.time()),
        }
        return Answer(200, self.accounts[name])

    def _create_link(self, form: Json) -> Answer:
        account = self.accounts.get(str(form.get("account")))
        if account is None:
            return refusal(404, f"No such account: '{form.get('account')}'", "resource_missing")
        name = self._name("link")
        self.links[name] = {"account": account["id"], "return_url": form["return_url"], "used": False}
        now_s = int(time.time())
        body = {"object": "account_link", "created": now_s, "expires_at": now_s + 300}
        return Answer(200, {**body, "url": f"{self.url}/setup/e/{name}"})

    def onboard(self, link: str) -> str | None:
        """What a seller does on the provider's page; where it takes them, or None for a link that is no more."""
        with self._lock:
            row = self.links.get(link)
            if row is None or row["used"]:
                return None
            row["used"] = True
            account = self.accounts[row["account"]]
            account.update(details_submitted=True, payouts_enabled=True)
            account["requirements"]["currently_due"] = []
            self._tell("account.updated", account)
            return str(row["return_url"])

    def _create_transfer(self, form: Json) -> Answer:
        account = self.accounts.get(str(form.get("destination")))
        cents = int(form.get("amount", 0))
        if account is None:
            return refusal(400, f"No such destination: '{form.get('destination')}'", "resource_missing_destination")
        if not account["payouts_enabled"]:
            message = "Your destination account needs to have the `transfers` capability enabled."
            return refusal(400, message, "insufficient_capabilities_for_transfer")
        if self._funds()["available"][0]["amount"] < cents:
            return refusal(400, "You have insufficient available funds in your Stripe account.", "balance_insufficient")
        name = self._name("tr")
        self.transfers[name] = {
            "id": name,
            "object": "transfer",
            "amount": cents,
            "amount_reversed": 0,
            "reversed": False,
            "currency": form["currency"],
            "destination": account["id"],
            "transfer_group": form.get("transfer_group"),
            "metadata": form.get("metadata", {}),
            "created": int(time.time()),
        }
        self._book("transfer", name, -cents, 0)
        self._tell("transfer.created", self.transfers[name])
        return Answer(200, self.transfers[name])

    def _create_refund(self, form: Json) -> Answer:
        intent = self.intents.get(str(form.get("payment_intent")))
        if intent is None:
            return refusal(404, f"No such payment_intent: '{form.get('payment_intent')}'", "resource_missing")
        cents = int(form.get("amount") or intent["amount"])
        before = sum(row["amount"] for row in self.refunds.values() if row["payment_intent"] == intent["id"])
        disputed = any(row["payment_intent"] == intent["id"] for row in self.disputes.values())
        if disputed:
            return refusal(400, "The charge has been charged back; cannot issue a refund.", "charge_disputed")
        if before + cents > intent["amount_received"]:
            message = f"Refund amount (${cents / 100:.2f}) is greater than unrefunded amount on charge."
            return refusal(400, message, "charge_already_refunded")
        name = self._name("re")
        self.refunds[name] = {
            "id": name,
            "object": "refund",
            "amount": cents,
            "currency": "usd",
            "payment_intent": intent["id"],
            "charge": intent["latest_charge"],
            "metadata": form.get("metadata", {}),
            "status": "succeeded",
            "created": int(time.time()),
        }
        self._book("refund", name, -cents, 0)
        self._tell("refund.created", self.refunds[name])
        return Answer(200, self.refunds[name])

    def _name(self, prefix: str) -> str:
        # The clock's part keeps names of two lives of this process apart: its books are gone with it, ours are not.
        return f"{prefix}_{time.time_ns() // 1000:x}{next(self._numbers):04x}"

    # ------------------------------------------------------------------------------------------------------- webhooks

    def _tell(self, kind: str, about: Json) -> None:
        name = self._name("evt")
        self.events[name] = event = {
            "id": name,
            "object": "event",
            "type": kind,
            "livemode": False,
            "api_version": "fake",
            "created": int(time.time()),
            "pending_webhooks": 1,
            "data": {"object": json.loads(json.dumps(about))},
        }
        if self.mode == "hold":
            self.held.append(event)
        else:
            for _ in range(2 if self.mode == "twice" else 1):
                self._send(event)

    def _send(self, event: Json) -> None:
        if self.webhook_url:
            courier = threading.Thread(target=self._deliver, args=(json.dumps(event), event["id"]), daemon=True)
            self._couriers.append(courier)
            courier.start()

    def _deliver(self, payload: str, name: str) -> None:
        pause_s = RETRY_FIRST_S
        for _ in range(DELIVERIES_MOST):
            try:
                headers = {"Stripe-Signature": self.sign(payload), "Content-Type": "application/json; charset=utf-8"}
                answer = httpx.post(self.webhook_url, content=payload, headers=headers, timeout=20)
                self.delivered.append((name, answer.status_code))
                if answer.is_success:
                    return
            except httpx.HTTPError:
                pass  # Nobody there yet: it is sent again, as after an answer that is no success.
            if self._closing.wait(pause_s):
                return
            pause_s = min(pause_s * 2, RETRY_MOST_S)

    def sign(self, payload: str, at_s: int | None = None) -> str:
        at_s = int(time.time()) if at_s is None else at_s
        mac = hmac.new(self.secret.encode(), f"{at_s}.{payload}".encode(), hashlib.sha256)
        return f"t={at_s},v1={mac.hexdigest()}"


class Handler(BaseHTTPRequestHandler):
    fake: FakeStripe
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if path.startswith("/v1/"):
            self._api("GET", {})
        elif path.startswith("/c/pay/"):
            self._answer(*self.fake.page(path.removeprefix("/c/pay/")), "text/html; charset=utf-8")
        elif path.startswith("/setup/e/"):
            link = self.fake.links.get(path.removeprefix("/setup/e/"))
            self._answer(*onboarding_page(link), "text/html; charset=utf-8")
        else:
            counts = {"sessions": len(self.fake.sessions), "events": len(self.fake.events), "held": len(self.fake.held)}
            self._answer(200, json.dumps(counts))

    def do_POST(self) -> None:
        path = urlsplit(self.path).path
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        form = nested(parse_qsl(body, keep_blank_values=True))
        if path.startswith("/v1/"):
            self._api("POST", form)
        elif path.startswith("/c/pay/"):
            self._press(path.removeprefix("/c/pay/"), str(form.get("button", "pay")))
        elif path.startswith("/setup/e/"):
            name = path.removeprefix("/setup/e/")
            target = self.fake.onboard(name)
            if target is None:
                self._answer(*onboarding_page(None), "text/html; charset=utf-8")
            else:
                self._answer(303, "", headers={"Location": target})
        elif path == "/_control":
            self._control(form)
        else:
            self._answer(404, "{}")

    def _api(self, method: str, form: Json) -> None:
        parts = urlsplit(self.path)
        key = self.headers.get("Authorization", "").removeprefix("Bearer ")
        idempotency_key = self.headers.get("Idempotency-Key", "")
        answer = self.fake.call(method, parts.path, nested(parse_qsl(parts.query)), form, key, idempotency_key)
        if answer.status == 0:
            self.close_connection = True  # Done, and the answer lost on its way.
            return
        seen = {name: value for name, value in answer.body.items() if not name.startswith("_")}
        headers = {"Idempotent-Replayed": "true"} if answer.replayed else {}
        self._answer(answer.status, json.dumps(seen), headers=headers)

    def _press(self, name: str, button: str) -> None:
        target = self.fake.press(name, button)
        if target is None:
            self._answer(*self.fake.page(name), "text/html; charset=utf-8")
        else:
            self._answer(303, "", headers={"Location": target})

    def _control(self, form: Json) -> None:
        """fail=429,500,drop | webhooks=deliver,hold,twice | release=1 | session=cs_...&cents=N | dispute=pi_... |
        won=du_... | lost=du_..."""
        if form.get("fail"):
            self.fake.fail_next(*form["fail"].split(","))
        if form.get("webhooks"):
            self.fake.webhooks(form["webhooks"])
        if form.get("release"):
            self.fake.release()
        if form.get("dispute"):
            self.fake.dispute(form["dispute"])
        for outcome in ("won", "lost"):
            if form.get(outcome):
                self.fake.decide(form[outcome], won=outcome == "won")
        if form.get("session"):
            self.fake.tamper(form["session"], int(form["cents"]))
        self._answer(200, "{}")

    def _answer(
        self, status: int, body: str, content_type: str = "application/json", headers: dict[str, str] | None = None
    ) -> None:
        data = body.encode()
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(data)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """One line a request is noise; a refused one is not."""
        if len(args) > 1 and str(args[1]) >= "400":
            super().log_message(format, *args)


def main() -> None:
    parser = argparse.ArgumentParser(description="A stateful stand-in for Stripe on this machine.")
    parser.add_argument("--port", type=int, default=12111)
    fake = FakeStripe(
        key=os.environ.get("STRIPE_SECRET_KEY") or "sk_test_embedded",
        secret=(os.environ.get("STRIPE_WEBHOOK_SECRETS") or "whsec_embedded").split(",")[0].strip(),
        webhook_url=os.environ.get("STRIPE_WEBHOOK_URL", ""),
        port=parser.parse_args().port,
    )
    fake.server.serve_forever()


if __name__ == "__main__":
    main()
