"""A Problem raised in a page's view becomes a page, with the status it would have over REST; so do an address that is
not there and a failure of ours.

Invariant: DRF and the agents' views answer their own Problems before this sees them, and below /api/ every other error
is JSON in their shape too. A form that is refused is the view's own affair: it comes back with what was typed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from urllib.parse import quote

from django.conf import settings
from django.db import OperationalError
from django.http import HttpRequest, HttpResponse, HttpResponseServerError, JsonResponse
from django.shortcuts import redirect, render, resolve_url

from marketplace.core.errors import NotFound, Problem, busy

TITLES = {
    402: "There is not enough money",
    403: "Not allowed",
    404: "Not found",
    409: "That no longer fits",
    410: "That is over",
    422: "Something is not right",
    429: "Too many requests",
    503: "Busy just now",
}


class ProblemPages:
    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        return self.get_response(request)

    def process_exception(self, request: HttpRequest, error: Exception) -> HttpResponse | None:
        if not isinstance(error, Problem):
            return None
        if error.status == 401:
            return redirect(f"{resolve_url(settings.LOGIN_URL)}?next={quote(request.get_full_path())}")
        context = {"problem": error, "title": TITLES.get(error.status, "That did not work")}
        response = render(request, "problem.html", context, status=error.status)
        if error.retry_after_s is not None:
            response["Retry-After"] = str(error.retry_after_s)
        return response


def not_found(request: HttpRequest, exception: Exception) -> HttpResponse:
    """For an address that is none of ours."""
    problem = NotFound("there is nothing at this address")
    if _is_api(request):
        return JsonResponse(problem.body(), status=problem.status)
    return render(request, "problem.html", {"problem": problem, "title": TITLES[404]}, status=problem.status)


def failure(request: HttpRequest) -> HttpResponse:
    """For a fault of ours, which is in the log, and for a database that is away: that passes, and may be tried again.
    No template: that may be what failed, and ours ask the database who is signed in."""
    if isinstance(sys.exception(), OperationalError):
        problem = busy()
        page = f"<!doctype html><html lang=en><title>{TITLES[503]}</title><p>{problem.message}</p></html>"
        answer = JsonResponse(problem.body()) if _is_api(request) else HttpResponse(page)
        answer.status_code, answer["Retry-After"] = problem.status, str(problem.retry_after_s)
        return answer
    words = "This failed on our side, and is in our log. Nothing was done by halves; try again."
    if _is_api(request):
        return JsonResponse({"code": "failure", "message": words, "fields": []}, status=500)
    page = f"<!doctype html><html lang=en><title>Failure</title><p>{words}</p><p><a href=/>Archipelago</a></p></html>"
    return HttpResponseServerError(page)


def _is_api(request: HttpRequest) -> bool:
    return request.path.startswith("/api/")
