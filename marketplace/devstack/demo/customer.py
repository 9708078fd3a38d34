"""A customer of the REST API: one organisation's key, and the few verbs the demo needs.

Invariant: a write carries an Idempotency-Key and is repeated with the same one when the answer was lost, as the API's
documentation asks of everybody.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Any

import httpx

# As long as a server that was killed takes to come back, and some.
PATIENCE_S = 30.0
AGAIN_AFTER_S = 0.25


class Refused(Exception):
    """The API said no; the message holds its code, its words and the fields it names."""


class Customer:
    def __init__(self, server_url: str, api_key: str) -> None:
        self.headers = {"Authorization": f"Bearer {api_key}"}
        self._http = httpx.Client(
            base_url=f"{server_url}/api/v1/",
            headers=self.headers,
            timeout=30,
            trust_env=False,
        )

    def close(self) -> None:
        self._http.close()

    def get(self, path: str, **query: Any) -> Any:
        return self._send("GET", path, params=query)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        return self._send("POST", path, json=body, headers={"Idempotency-Key": str(uuid.uuid4())})

    def patch(self, path: str, body: dict[str, Any]) -> Any:
        return self._send("PATCH", path, json=body)

    def items(self, path: str, **query: Any) -> Iterator[dict[str, Any]]:
        """All items of a list, page by page."""
        page = self.get(path, **query)
        yield from page["results"]
        while page.get("next"):
            page = self._send("GET", page["next"])
            yield from page["results"]

    def _send(self, method: str, path: str, **more: Any) -> Any:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                answer = self._http.request(method, path, **more)
                if answer.status_code < 500:
                    break
                failure = f"status {answer.status_code}"
            except httpx.TransportError as error:
                failure = str(error) or type(error).__name__
            if time.monotonic() > deadline:
                raise Refused(f"{method} {path}: no answer in {PATIENCE_S:g} s, at last {failure}")
            time.sleep(AGAIN_AFTER_S)
        if answer.is_error:
            raise Refused(f"{method} {path}: {answer.status_code} {_words(answer)}")
        return answer.json() if answer.content else None


def _words(answer: httpx.Response) -> str:
    try:
        problem = answer.json()
        fields = "; ".join(f"{field['field']}: {field['message']}" for field in problem.get("fields", []))
        return f"{problem['code']}: {problem['message']} {fields}".strip()
    except (ValueError, KeyError, TypeError):
        return answer.text[:200]
