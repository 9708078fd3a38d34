"""The usage spool: what was metered and is not yet acknowledged, on disk.

One line a record: CRC-32 of the JSON in hex, a space, the JSON, a newline. The first line is a base: the epoch, the
last acknowledged sequence number and the newest entry of every assignment, so that the file alone restores each
cumulative counter. Acknowledgement rewrites the file (temporary, fsync, rename) once enough lines have piled up.

Invariants: a sequence number is never used twice within an epoch; a torn or damaged line costs only itself, because
each record is a cumulative counter and the next one makes up for it; a full disk loses nothing, for the same reason:
the record is still sent, held in memory, and `problem` says so.
"""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass
from pathlib import Path

import msgspec

from worker_agent.protocol import UsageRecord
from worker_agent.state import write_atomic

COMPACT_LINES = 512
SEND_LIMIT = 500
_SEQ_RESERVE = 1000  # after damage, skip ahead so that a number lost with its line is not used again


class SpoolEntry(msgspec.Struct, kw_only=True, frozen=True):
    """A usage record, and the monotonic instant up to which it counts: total and instant are one write, so a crash can
    never leave a total without the moment it belongs to (which would count time twice)."""

    record: UsageRecord
    counted_until_ms: int
    kernel_boot_id: str


class _Base(msgspec.Struct, kw_only=True):
    epoch: int
    next_seq: int
    acked_seq: int
    latest: list[SpoolEntry] = []


class Spool:
    """One writer. `problem` is empty, or says in words why the last append is in memory only."""

    def __init__(self, path: Path, epoch: int) -> None:
        self._path = path
        self.problem = ""
        self.damaged_lines = 0
        self._lines = 0
        self._base = _Base(epoch=epoch, next_seq=1, acked_seq=0)
        self._latest: dict[str, SpoolEntry] = {}
        self._unwritten = False
        self._load(epoch)

    # -- reading

    @property
    def acked_seq(self) -> int:
        return self._base.acked_seq

    @property
    def next_seq(self) -> int:
        return self._base.next_seq

    def latest(self, assignment_id: str) -> SpoolEntry | None:
        return self._latest.get(assignment_id)

    def assignment_ids(self) -> list[str]:
        return list(self._latest)

    def pending(self, limit: int = SEND_LIMIT) -> list[UsageRecord]:
        """Unacknowledged, oldest first; of one assignment only the newest, which contains all before it."""
        records = [e.record for e in self._latest.values() if e.record.seq > self._base.acked_seq]
        return sorted(records, key=lambda record: record.seq)[:limit]

    # -- writing

    def append(
        self, assignment_id: str, gpu_ms_total: int, *, observed_at_ms: int, counted_until_ms: int, kernel_boot_id: str
    ) -> UsageRecord:
        """Durable on return unless `problem` is set. A total never falls: a smaller one than known is raised to it."""
        known = self._latest.get(assignment_id)
        if known is not None:
            gpu_ms_total = max(gpu_ms_total, known.record.gpu_ms_total)
        record = UsageRecord(
            seq=self._base.next_seq,
            assignment_id=assignment_id,
            gpu_ms_total=gpu_ms_total,
            observed_at_ms=observed_at_ms,
        )
        entry = SpoolEntry(record=record, counted_until_ms=counted_until_ms, kernel_boot_id=kernel_boot_id)
        self._base.next_seq += 1
        self._latest[assignment_id] = entry
        if self._unwritten or self._lines >= COMPACT_LINES:
            self._rewrite()  # brings the file up to date as a whole, including what did not fit before
        else:
            self._write_line(entry)
        return record

    def acknowledge(self, seq: int) -> None:
        """Everything up to `seq` is durable elsewhere. A reordered or repeated acknowledgement changes nothing.

        One beyond what this file knows means numbers were lost with it (they were sent while the disk was full, then
        the agent was killed): what is still pending gets new numbers above it, or it would pass for acknowledged."""
        if seq >= self._base.next_seq:
            pending = self.pending(limit=len(self._latest))
            self._base.acked_seq, self._base.next_seq = seq, seq + 1
            for record in pending:
                entry = self._latest[record.assignment_id]
                renumbered = msgspec.structs.replace(record, seq=self._base.next_seq)
                self._latest[record.assignment_id] = msgspec.structs.replace(entry, record=renumbered)
                self._base.next_seq += 1
            self._rewrite()
            return
        if seq <= self._base.acked_seq:
            return
        self._base.acked_seq = seq
        if self._lines >= COMPACT_LINES or self._unwritten:
            self._rewrite()

    def forget(self, assignment_id: str) -> bool:
        """Drop an acknowledged counter that cannot come back. False while its last record is not acknowledged."""
        entry = self._latest.get(assignment_id)
        if entry is None:
            return True
        if entry.record.seq > self._base.acked_seq:
            return False
        del self._latest[assignment_id]
        self._rewrite()
        return True

    def flush(self) -> None:
        """Write the whole state as one fresh file (at a clean end)."""
        self._rewrite()

    # -- the file

    def _load(self, epoch: int) -> None:
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            self._rewrite()
            return
        parsed = _parse(content)
        self.damaged_lines = parsed.damaged_lines
        good_base = parsed.base is not None
        if parsed.base is not None:
            self._base = parsed.base
        for entry in parsed.entries:
            self._take(entry)
        if self._base.epoch != epoch and good_base:
            # Another enrolment: its records would be refused, and the counters begin anew by the protocol. Up to when
            # each was counted is kept: the work may still be running, and an instant counts in one epoch only.
            self._base = _Base(epoch=epoch, next_seq=1, acked_seq=0)
            self._latest = {key: _emptied(entry) for key, entry in self._latest.items()}
        elif self.damaged_lines or not good_base:
            self._base.epoch = epoch
            self._base.next_seq += _SEQ_RESERVE
        self._rewrite()

    def _take(self, entry: SpoolEntry) -> None:
        known = self._latest.get(entry.record.assignment_id)
        if known is None or entry.record.seq > known.record.seq:
            self._latest[entry.record.assignment_id] = entry
        self._base.next_seq = max(self._base.next_seq, entry.record.seq + 1)

    def _write_line(self, entry: SpoolEntry) -> None:
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND)
            try:
                line = _line(msgspec.json.encode(entry))
                if os.write(descriptor, line) != len(line):
                    raise OSError("short write")
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            self._failed(error)
            return
        self._lines += 1

    def _rewrite(self) -> None:
        base = msgspec.structs.replace(self._base, latest=list(self._latest.values()))
        try:
            write_atomic(self._path, _line(msgspec.json.encode(base)))
        except OSError as error:
            self._failed(error)
            return
        self._lines = 1
        self._unwritten = False
        self.problem = ""

    def _failed(self, error: OSError) -> None:
        self._unwritten = True
        self.problem = f"usage is held in memory only, {self._path} cannot be written: {error.strerror or error}"


@dataclass(frozen=True)
class SpoolState:
    assignments: int
    pending: int
    damaged_lines: int


def inspect(path: Path) -> SpoolState:
    """A look from outside that changes nothing, also while an agent writes."""
    parsed = _parse(path.read_bytes())
    newest: dict[str, int] = {}
    for entry in parsed.entries:
        newest[entry.record.assignment_id] = max(newest.get(entry.record.assignment_id, 0), entry.record.seq)
    acked = 0 if parsed.base is None else parsed.base.acked_seq
    return SpoolState(len(newest), sum(1 for seq in newest.values() if seq > acked), parsed.damaged_lines)


@dataclass(frozen=True)
class _Parsed:
    base: _Base | None
    entries: list[SpoolEntry]
    damaged_lines: int


def _parse(content: bytes) -> _Parsed:
    base: _Base | None = None
    entries: list[SpoolEntry] = []
    lines = content.split(b"\n")
    damaged = 1 if lines.pop() else 0  # what follows the last newline: empty, or a record cut short
    for number, line in enumerate(lines):
        payload = _checked(line)
        try:
            if payload is None:
                damaged += 1
            elif number == 0:
                base = msgspec.json.decode(payload, type=_Base)
                entries.extend(base.latest)
            else:
                entries.append(msgspec.json.decode(payload, type=SpoolEntry))
        except msgspec.DecodeError:
            damaged += 1
    return _Parsed(base, entries, damaged)


def _emptied(entry: SpoolEntry) -> SpoolEntry:
    """With nothing to report, as of a number before the first."""
    return msgspec.structs.replace(entry, record=msgspec.structs.replace(entry.record, seq=0, gpu_ms_total=0))


def _line(payload: bytes) -> bytes:
    return b"%08x %s\n" % (zlib.crc32(payload), payload)


def _checked(line: bytes) -> bytes | None:
    """The JSON of a line whose checksum fits."""
    checksum, separator, payload = line.partition(b" ")
    if not separator or len(checksum) != 8 or checksum != b"%08x" % zlib.crc32(payload):
        return None
    return payload
