"""The local store over HTTP: GET and PUT of one object at an address we signed.

Invariant: the signature says which object, for whom and for what; nothing else opens it, and no cookie does. Bytes are
streamed either way: no object is held in memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from django.conf import settings
from django.http import HttpRequest, HttpResponse, HttpResponseBase, StreamingHttpResponse
from django.views.decorators.csrf import csrf_exempt

from marketplace.core.clock import database_now
from marketplace.core.errors import InvalidInput, NotFound, Problem, TooLarge
from marketplace.fleet.wire import refusal
from marketplace.training.services.blobs import note_stored
from marketplace.training.store import CHUNK_BYTES, LocalStore, Ticket, chunks_of, plain_filename, read_ticket

_RANGE = re.compile(r"bytes=(\d*)-(\d*)")


@csrf_exempt
def artifact(request: HttpRequest, token: str) -> HttpResponseBase:
    try:
        if request.method in ("GET", "HEAD"):
            return _send(request, read_ticket(token, "get"))
        if request.method == "PUT":
            return _receive(request, read_ticket(token, "put"))
        return HttpResponse(status=405, headers={"Allow": "GET, HEAD, PUT"})
    except Problem as problem:
        return refusal(problem)


def _receive(request: HttpRequest, ticket: Ticket) -> HttpResponse:
    length = request.META.get("CONTENT_LENGTH") or ""
    if not length.isdecimal():
        raise InvalidInput.at("Content-Length", "must be stated")
    if int(length) > ticket.size_bytes:
        raise TooLarge(f"{ticket.size_bytes:,} bytes were announced, and {int(length):,} are to be sent")
    LocalStore(Path(settings.ARTIFACT_DIR)).write(ticket.digest, ticket.size_bytes, chunks_of(request))
    note_stored(ticket.artifact_id, database_now())
    return HttpResponse(status=201)


def _send(request: HttpRequest, ticket: Ticket) -> HttpResponseBase:
    path = LocalStore(Path(settings.ARTIFACT_DIR)).path(ticket.digest)
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise NotFound("the store has no such object") from None
    headers = {
        "Accept-Ranges": "bytes",
        "ETag": f'"{ticket.digest}"',
        "Cache-Control": "private, max-age=31536000, immutable",
        "X-Content-Type-Options": "nosniff",
    }
    if ticket.artifact_id:  # a name to be saved under
        headers["Content-Disposition"] = f'attachment; filename="{plain_filename(ticket.artifact_id)}"'
    wanted = _range(request.headers.get("Range", ""), size)
    if wanted is None:
        return HttpResponse(status=416, headers={"Content-Range": f"bytes */{size}"})
    first, end = wanted
    status = 206 if (first, end) != (0, size) else 200
    if status == 206:
        headers["Content-Range"] = f"bytes {first}-{end - 1}/{size}"
    headers["Content-Length"] = str(end - first)
    body = iter(()) if request.method == "HEAD" else _read(path, first, end)
    return StreamingHttpResponse(body, status=status, content_type="application/octet-stream", headers=headers)


def _range(header: str, size: int) -> tuple[int, int] | None:
    """First byte and the one after the last; all of it where nothing, or nothing we understand, is asked; None where
    what is asked lies outside."""
    match = _RANGE.fullmatch(header.strip())
    if match is None or match.groups() == ("", ""):
        return 0, size
    first, last = match.groups()
    if not first:  # the last so many
        return (max(0, size - int(last)), size) if int(last) else None
    end = min(size, int(last) + 1) if last else size
    return (int(first), end) if int(first) < end else None


def _read(path: Path, first: int, end: int) -> Iterator[bytes]:
    with open(path, "rb") as file:
        file.seek(first)
        left = end - first
        while left and (chunk := file.read(min(CHUNK_BYTES, left))):
            left -= len(chunk)
            yield chunk
