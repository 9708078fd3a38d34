"""A closed-loop load on one loopback server: connections that ask again as soon as they are answered.

Invariant: it stops by itself after the given seconds, talks to loopback only, and counts an answer that is not as
wished (200, if nothing else is said) as an error, never as speed. A process of its own, so that the server's figures
are not the client's.
"""

from __future__ import annotations

import http.client
import multiprocessing
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Ask:
    """One request of a mix."""

    method: str
    path: str
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Figures:
    requests: int
    errors: int
    seconds: float
    p50_ms: float
    p95_ms: float
    p99_ms: float

    @property
    def per_s(self) -> float:
        return self.requests / self.seconds


def closed_loop(
    base_url: str, asks: Sequence[Ask], *, connections: int, seconds: float, good: Sequence[int] = (200,)
) -> Figures:
    """Every connection walks the mix from a place of its own, for `seconds`."""
    host = urlsplit(base_url)
    if host.hostname != "127.0.0.1" or host.port is None:
        raise ValueError("loads are for loopback only")
    port = host.port
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_drive, args=(sender, port, list(asks), connections, seconds, tuple(good)))
    process.start()
    took_ms, errors, spent_s = receiver.recv()
    process.join()
    ordered = sorted(took_ms)
    return Figures(
        requests=len(ordered),
        errors=errors,
        seconds=spent_s,
        p50_ms=_at(ordered, 0.50),
        p95_ms=_at(ordered, 0.95),
        p99_ms=_at(ordered, 0.99),
    )


def timed(work: Callable[[], object], seconds: float) -> float:
    """How often a second one thread can do `work`."""
    done, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        work()
        done += 1
    return done / (time.perf_counter() - started)


def _at(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def _drive(sender: object, port: int, asks: list[Ask], connections: int, seconds: float, good: tuple[int, ...]) -> None:
    took_ms: list[list[float]] = [[] for _ in range(connections)]
    errors = [0] * connections
    started = time.perf_counter()

    def walk(number: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        at = number * len(asks) // connections
        while time.perf_counter() - started < seconds:
            ask = asks[at % len(asks)]
            at += 1
            asked = time.perf_counter()
            connection.request(ask.method, ask.path, body=ask.body or None, headers=dict(ask.headers))
            answer = connection.getresponse()
            answer.read()
            if answer.status in good:
                took_ms[number].append((time.perf_counter() - asked) * 1000)
            else:
                errors[number] += 1
        connection.close()

    threads = [threading.Thread(target=walk, args=(number,)) for number in range(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spent = time.perf_counter() - started
    sender.send(([ms for one in took_ms for ms in one], sum(errors), spent))  # type: ignore[attr-defined]
