"""How the demo speaks: one line an event, time first; a bar for what takes longer; tables with numbers aligned.

Invariant: what is written to a pipe reads as plain lines; a bar that moves is drawn only on a terminal.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TextIO

BAR_WIDTH = 24
PLAIN_BAR_EVERY_S = 10.0


class Voice:
    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._live = self._out.isatty()
        self._started = time.monotonic()
        self._bar_shown = False
        self._bar_said_at = 0.0

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    def say(self, what: str, detail: str = "") -> None:
        """One event: what happened, and its particulars."""
        self._clear_bar()
        stamp = f"{int(self.elapsed_s) // 60:02d}:{int(self.elapsed_s) % 60:02d}"
        self._write(f"{self._dim(stamp)}  {what:<22} {detail}".rstrip() + "\n")

    def title(self, text: str) -> None:
        self._clear_bar()
        self._write(f"\n{self._bold(text)}\n")

    def line(self, text: str = "") -> None:
        self._clear_bar()
        self._write(f"{text}\n")

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]], right: str = "") -> None:
        """`right` has one letter a column: r for numbers, l for words."""
        self._clear_bar()
        widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
        sides = (right + "l" * len(head))[: len(head)]
        for number, row in enumerate([head, *rows]):
            cells = [
                cell.rjust(width) if side == "r" else cell.ljust(width)
                for cell, width, side in zip(row, widths, sides, strict=True)
            ]
            text = "  " + "  ".join(cells).rstrip()
            self._write(f"{self._dim(text) if number == 0 else text}\n")

    def bar(self, share: float, words: str) -> None:
        """Progress, drawn over itself on a terminal, said now and then elsewhere."""
        now = time.monotonic()
        if not self._live and now - self._bar_said_at < PLAIN_BAR_EVERY_S:
            return
        self._bar_said_at = now
        full = round(BAR_WIDTH * min(max(share, 0.0), 1.0))
        text = f"       [{'█' * full}{'·' * (BAR_WIDTH - full)}] {share:4.0%}  {words}"
        if self._live:
            self._write(f"\r\x1b[2K{text}")
            self._bar_shown = True
        else:
            self._write(f"{text}\n")

    def _clear_bar(self) -> None:
        if self._bar_shown:
            self._write("\r\x1b[2K")
            self._bar_shown = False

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()

    def _dim(self, text: str) -> str:
        return f"\x1b[2m{text}\x1b[0m" if self._live else text

    def _bold(self, text: str) -> str:
        return f"\x1b[1m{text}\x1b[0m" if self._live else text
