"""Polling beside the training loop, so that a sealed round, a stop or a moved deadline is noticed between two steps.

Invariant: the watcher only observes. It never applies, submits or leaves; it hands its verdict to the round loop, which
polls again by itself before it acts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

from worker_agent.protocol import PollReply
from worker_agent.trainer.errors import TrainerError, Unreachable


class Watch:
    """A context around one round's training. `verdict` is the first answer that means: this order is over."""

    def __init__(self, poll: Callable[[], PollReply], *, round: int, first_poll_ms: int) -> None:
        self._poll = poll
        self._round = round
        self._interval_s = max(first_poll_ms, 50) / 1000
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)
        self.verdict: PollReply | None = None
        self.error: TrainerError | None = None
        self.latest: PollReply | None = None

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def over(self) -> bool:
        return self.verdict is not None or self.error is not None

    def _watch(self) -> None:
        while not self._ended.wait(self._interval_s):
            try:
                reply = self._poll()
            except Unreachable:
                continue  # the work is worth keeping: whether the coordinator is gone, the submission will tell
            except TrainerError as error:
                self.error = error
                return
            self._interval_s = max(reply.next_poll_ms, 50) / 1000
            same = reply.order is not None and reply.order.round == self._round
            if reply.command == "wait" or (reply.command == "train" and same):
                self.latest = reply
            else:
                self.verdict = reply
                return
