"""The demo's acts, in order, and what must be true at the end of each.

Nothing here knows the server from inside: it signs people up with the operator's command, and from then on it is a
seller and a buyer at the REST API, and clusters that dial in. Invariant: a claim is checked against what the API
answers, never against what the story meant to do.
"""

from __future__ import annotations

import json
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from marketplace.core.money import format_usd
from marketplace.devstack.demo import facts
from marketplace.devstack.demo.agents import Cluster
from marketplace.devstack.demo.customer import Customer
from marketplace.devstack.demo.facts import Claim
from marketplace.devstack.demo.pictures import Pictures
from marketplace.devstack.demo.voice import Voice
from marketplace.devstack.stack import Stack
from marketplace.devstack.state import REPOSITORY

SELLER, BUYER = "seller@demo.example", "buyer@demo.example"
TOP_UP_UUSD = 50_000_000
BUDGET_UUSD = 20_000_000
TOKENS = 1_600_000
TRAIN_LIMIT_S = 200.0
SETTLE_LIMIT_S = 40.0
# The plug is pulled in this round, and the fourth island comes when the first is seen to be lost.
KILL_IN_ROUND = 5

SPEC: dict[str, Any] = {
    "name": "byte-level GPT on Python's own sources",
    "model": {"kind": "gpt", "n_layer": 2, "n_head": 4, "d_model": 64, "context": 64},
    "data": {"kind": "builtin", "name": "python-stdlib"},
    "tokens": TOKENS,
    "batch_tokens": 1024,
    "budget_uusd": BUDGET_UUSD,
    "min_islands": 1,
    "max_islands": 3,
    "seed": 1,
    "threads": 1,
    "sync": {"inner_steps": 40, "codec": "int4", "grace_ms": 2000, "round_deadline_ms": 20_000},
}


@dataclass(frozen=True)
class Plan:
    """An island of the story."""

    name: str
    gpu: str
    gpu_name: str  # as the driver spells it
    gpus: int
    price_uusd_per_gpu_hour: int
    wan_mbps: int


PLANS = (
    Plan("tromso", "h100-sxm-80g", "NVIDIA H100 80GB HBM3", 4, 2_100_000, 900),
    Plan("lisbon", "a100-sxm-80g", "NVIDIA A100-SXM4-80GB", 2, 1_140_000, 400),
    Plan("tartu", "l40s-pcie-48g", "NVIDIA L40S", 1, 780_000, 200),
)
LATE = Plan("porto", "a100-sxm-80g", "NVIDIA A100-SXM4-80GB", 2, 1_200_000, 500)


class Story:
    """Told against `stack`; agents live below `folder`; `pictures` is a folder for pictures of its pages."""

    def __init__(self, stack: Stack, voice: Voice, folder: Path, *, pictures: Path | None = None) -> None:
        self.voice = voice
        self.clusters: dict[str, Cluster] = {}
        self.islands: dict[str, str] = {}  # name -> id
        self.claims: list[Claim] = []
        self.password = secrets.token_urlsafe(9)
        self.cut: tuple[str, int] = ("", -1)  # the island whose plug was pulled, and in which round
        self.server_url = stack.web_url
        self._stack = stack
        self._folder = folder
        self._opened: list[Customer] = []
        self._pictures = None if pictures is None else Pictures(pictures, self.server_url, BUYER, self.password)

    def close(self) -> None:
        for cluster in self.clusters.values():
            cluster.stop()
        for customer in self._opened:
            customer.close()

    def claim(self, what: str, holds: bool, seen: str) -> None:
        self.claims.append(Claim(what, holds, seen))

    # ------------------------------------------------------------------------------------------------------ the acts

    def tell(self) -> None:
        self.catalogue()
        seller = self.sign_up(SELLER, "Northern Islands")
        buyer = self.sign_up(BUYER, "Small Model Lab")
        self.voice.say("look at it", f"{self.server_url}  as {BUYER}, password {self.password}")
        self.sell(seller, PLANS)
        self.picture("market", "/market", height_px=1180, shown="svg")
        self.top_up(buyer)
        job = self.submit(buyer)
        job = self.train(seller, buyer, job["id"])
        self.settle(buyer, job["id"])
        self.report(seller, buyer, job["id"])

    def catalogue(self) -> None:
        self.manage("load_catalogue")
        offers = self._public("offers", limit=1)
        cheapest = self._public("offers", gpu="h100-sxm-80g", limit=1)["results"][0]
        price = format_usd(cheapest["price_uusd_per_gpu_hour"], 2)
        self.voice.say(
            "catalogue loaded",
            f"{offers['count']} list prices, cheapest H100 SXM {price} /GPU-h at {cheapest['channel_name']}"
            f" ({cheapest['freshness']})",
        )
        self.claim("the catalogue holds real list prices", offers["count"] >= 300, f"{offers['count']} offers")

    def sign_up(self, email: str, organisation: str) -> Customer:
        told = self.manage("add_account", email, organisation, stdin=f"{self.password}\n")
        customer = Customer(self.server_url, json.loads(told)["api_key"])
        self._opened.append(customer)
        return customer

    def sell(self, seller: Customer, plans: tuple[Plan, ...]) -> None:
        """Register islands, and start their clusters' agents with one-time join tokens."""
        site = seller.post("sites", {"name": f"{plans[0].name} hall", "country": "", "region": ""})
        for plan in plans:
            island = seller.post(
                "islands",
                {
                    "site_id": site["id"],
                    "name": plan.name,
                    "gpu": plan.gpu,
                    "gpu_count": plan.gpus,
                    "price_uusd_per_gpu_hour": plan.price_uusd_per_gpu_hour,
                    "available_from": datetime.now(UTC).isoformat(),
                    "wan_up_mbps": plan.wan_mbps,
                    "wan_down_mbps": plan.wan_mbps,
                    "simulated": True,
                },
            )
            self.islands[plan.name] = island["id"]
            token = seller.post(f"islands/{island['id']}/join-tokens", {})
            cluster = Cluster(
                plan.name,
                self._folder / plan.name,
                self.server_url,
                gpus=plan.gpus,
                gpu_name=plan.gpu_name,
            )
            cluster.enrol(token["token"])
            cluster.run()
            self.clusters[plan.name] = cluster
            price = format_usd(plan.price_uusd_per_gpu_hour, 2)
            self.voice.say(
                "island joins",
                f"{plan.name:<8} {plan.gpus} x {plan.gpu:<15} {price} /GPU-h   agent process {cluster.pid}",
            )
        self.until(
            lambda: all(self.island(seller, plan.name)["state"] == "online" for plan in plans),
            30,
            "the islands are online",
        )

    def top_up(self, buyer: Customer) -> None:
        """Pay as a browser would: follow the payment page's address and press its button."""
        top_up = buyer.post("top-ups", {"amount_uusd": TOP_UP_UUSD})
        with httpx.Client(follow_redirects=False, trust_env=False, timeout=30) as browser:
            page = browser.get(top_up["pay_url"])
            button = re.search(r'<button[^>]*name="([^"]*)"[^>]*value="(pay)"', page.text)
            if button is None:
                raise RuntimeError("the payment page has no button to press")
            browser.post(top_up["pay_url"], data={button.group(1): button.group(2)})
        self.until(lambda: buyer.get(f"top-ups/{top_up['id']}")["state"] == "paid", 30, "the payment is confirmed")
        balance = buyer.get("balance")
        self.voice.say("buyer tops up", f"{format_usd(TOP_UP_UUSD)} by card; cash {format_usd(balance['cash_uusd'])}")
        self.claim("the payment is in the ledger once", balance["cash_uusd"] == TOP_UP_UUSD, str(balance["cash_uusd"]))

    def submit(self, buyer: Customer) -> dict[str, Any]:
        job: dict[str, Any] = buyer.post("jobs", SPEC)
        self.voice.say(
            "job submitted",
            f"{job['id']}: {TOKENS / 1e6:g} M tokens, budget {format_usd(BUDGET_UUSD)} held, at most"
            f" {SPEC['max_islands']} islands",
        )
        return job

    def train(self, seller: Customer, buyer: Customer, job_id: str) -> dict[str, Any]:
        """Watch it train; pull the plug of one island in the middle of a round; let a fourth one join."""
        self.voice.say("watch", f"{self.server_url}/jobs/{job_id}")
        events = _Events(buyer, job_id)
        victim = ""
        late = False
        deadline = time.monotonic() + TRAIN_LIMIT_S
        while time.monotonic() < deadline:
            job: dict[str, Any] = buyer.get(f"jobs/{job_id}")
            for event in events.new():
                if event["kind"] != "sealed":
                    self.voice.say(event["kind"], event["message"])
            if job["state"] in ("succeeded", "stopped", "cancelled", "failed"):
                self.voice.say(f"job {job['state']}", job["reason"])
                self.picture("job", f"/jobs/{job_id}", height_px=1480, shown=".uplot canvas")
                return job
            self._progress(job)
            if not victim and job["rounds_sealed"] >= KILL_IN_ROUND:
                victim = self._cut_one(buyer, job_id)
            if victim and not late and self.island(seller, victim)["state"] == "lost":
                self.voice.say("island lost", f"{victim}: its agent missed its beats")
                self.sell(seller, (LATE,))
                late = True
            time.sleep(0.4)
        raise RuntimeError(f"the job did not end within {TRAIN_LIMIT_S:g} s")

    def _cut_one(self, buyer: Customer, job_id: str) -> str:
        """Take the power of an island whose trainer is at work in the open round."""
        open_round = buyer.get(f"jobs/{job_id}/metrics")["open_round"]
        training = [seat["island_name"] for seat in (open_round or {}).get("seats", []) if not seat["submitted"]]
        running = [name for name in ("lisbon", "tartu", "tromso") if name in training]
        if not running:
            return ""
        victim = running[0]
        pids = self.clusters[victim].pull_the_plug()
        self.voice.say(
            "plug pulled",
            f"{victim}, in the middle of round {open_round['number']}: processes"
            f" {', '.join(str(pid) for pid in pids)} killed with SIGKILL",
        )
        self.cut = (victim, open_round["number"])
        return victim

    def settle(self, buyer: Customer, job_id: str) -> None:
        self.until(lambda: buyer.get("balance")["held_uusd"] == 0, SETTLE_LIMIT_S, "what was held is given back")
        for cluster in self.clusters.values():
            cluster.stop()

    @property
    def held(self) -> bool:
        """Whether the story was told to its end and everything it claims is true."""
        return bool(self.claims) and all(claim.holds for claim in self.claims)

    def report(self, seller: Customer, buyer: Customer, job_id: str) -> None:
        job = buyer.get(f"jobs/{job_id}")
        rounds = buyer.get(f"jobs/{job_id}/metrics")["rounds"]
        facts.rounds_table(self.voice, rounds)
        facts.invoice(self.voice, buyer, job)
        facts.seller_lines(self.voice, seller)
        self.claims += facts.about_training(job, rounds)
        self.claims += facts.about_islands(rounds, cut=self.cut, late=LATE.name)
        self.claims += facts.about_money(job, buyer, seller)
        books = self.manage("check_ledger")
        self.claims.append(Claim("the ledger's own checks find nothing", True, books.strip().splitlines()[-1]))
        facts.verdict(self.voice, self.claims)

    # ------------------------------------------------------------------------------------------------------ the parts

    def picture(self, name: str, path: str, *, height_px: int, shown: str) -> None:
        if self._pictures is not None:
            self._pictures.take(name, path, height_px=height_px, shown=shown)
            self.voice.say("picture taken", f"{name}.png")

    def island(self, seller: Customer, name: str) -> dict[str, Any]:
        island: dict[str, Any] = seller.get(f"islands/{self.islands[name]}")
        return island

    def manage(self, *command: str, stdin: str = "") -> str:
        done = subprocess.run(
            [sys.executable, "manage.py", *command],
            cwd=REPOSITORY,
            env=self._stack.env,
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        if done.returncode != 0:
            raise RuntimeError(f"manage.py {command[0]}: {done.stderr.strip()[-600:]}")
        return done.stdout

    def until(self, holds: Callable[[], bool], limit_s: float, what: str) -> None:
        deadline = time.monotonic() + limit_s
        while not holds():
            if time.monotonic() > deadline:
                raise RuntimeError(f"not within {limit_s:g} s: {what}")
            time.sleep(0.2)

    def _public(self, path: str, **query: Any) -> Any:
        return httpx.get(f"{self.server_url}/api/v1/{path}", params=query, timeout=30, trust_env=False).json()

    def _progress(self, job: dict[str, Any]) -> None:
        bpb = job["bits_per_byte_last"]
        self.voice.bar(
            job["tokens_sealed"] / job["tokens_target"],
            f"round {job['rounds_sealed']:>2}   {'-' if bpb is None else f'{bpb:.3f}'} bits/byte"
            f"   {job['islands_now']} islands   {format_usd(job['spent_uusd'], 4)} of {format_usd(job['budget_uusd'])}",
        )


class _Events:
    """A job's events as they come."""

    def __init__(self, customer: Customer, job_id: str) -> None:
        self._customer = customer
        self._path = f"jobs/{job_id}/events"
        self._after = 0

    def new(self) -> list[dict[str, Any]]:
        page = self._customer.get(self._path, after=self._after)
        self._after = page["last_seq"]
        events: list[dict[str, Any]] = page["results"]
        return events
