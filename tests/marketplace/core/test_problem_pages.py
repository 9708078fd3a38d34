"""A refusal in a page is a page, with its words and its status."""

from __future__ import annotations

import pytest
from django.db import OperationalError
from django.http import HttpRequest, HttpResponse
from django.test import Client, override_settings
from django.urls import include, path
from rest_framework.permissions import AllowAny
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from marketplace.core.errors import Busy, NotFound, Unauthorised

pytestmark = pytest.mark.django_db


def missing(request: HttpRequest) -> HttpResponse:
    raise NotFound("there is no such lease")


def busy(request: HttpRequest) -> HttpResponse:
    raise Busy("the book is being cleared", retry_after_s=2)


def signed_out(request: HttpRequest) -> HttpResponse:
    raise Unauthorised("sign in")


def broken(request: HttpRequest) -> HttpResponse:
    raise RuntimeError("a secret of the code")


def away(request: HttpRequest) -> HttpResponse:
    raise OperationalError("connection failed: a secret of the network")


class AwayView(APIView):
    permission_classes = [AllowAny]

    def get(self, request: Request) -> Response:
        raise OperationalError("connection failed: a secret of the network")


handler404 = "marketplace.core.web.not_found"
handler500 = "marketplace.core.web.failure"
urlpatterns = [
    path("broken", broken),
    path("api/broken", broken),
    path("away", away),
    path("api/away", away),
    path("api/v1/away", AwayView.as_view()),
    path("missing", missing),
    path("busy", busy),
    path("signed-out", signed_out),
    path("", include("marketplace.urls")),
]


@override_settings(ROOT_URLCONF=__name__)
def test_a_problem_is_a_page_with_its_status_and_its_words(client: Client) -> None:
    page = client.get("/missing")
    assert page.status_code == 404
    assert "There is no such lease." in page.content.decode()


@override_settings(ROOT_URLCONF=__name__)
def test_a_busy_page_says_when_to_come_back(client: Client) -> None:
    assert client.get("/busy")["Retry-After"] == "2"


@override_settings(ROOT_URLCONF=__name__)
def test_who_is_signed_out_is_taken_to_sign_in_and_back(client: Client) -> None:
    assert client.get("/signed-out?x=1")["Location"] == "/accounts/login/?next=/signed-out%3Fx%3D1"


def test_an_address_that_is_not_there_is_a_page_and_below_the_api_json(client: Client) -> None:
    page = client.get("/nowhere")
    assert (page.status_code, page["Content-Type"]) == (404, "text/html; charset=utf-8")
    assert "There is nothing at this address." in page.content.decode()
    answer = client.get("/api/v1/nowhere")
    assert answer.status_code == 404
    assert answer.json() == {"code": "not_found", "message": "there is nothing at this address", "fields": []}


@override_settings(ROOT_URLCONF=__name__)
@pytest.mark.parametrize("path", ["/broken", "/api/broken"])
def test_a_failure_of_ours_tells_nothing_of_the_code(path: str) -> None:
    answer = Client(raise_request_exception=False).get(path)
    assert answer.status_code == 500
    assert "secret" not in answer.content.decode()
    assert path == "/broken" or answer.json()["code"] == "failure"


@override_settings(ROOT_URLCONF=__name__)
@pytest.mark.parametrize("path", ["/away", "/api/away", "/api/v1/away"])
def test_a_database_that_is_away_is_an_answer_to_try_again(path: str) -> None:
    answer = Client(raise_request_exception=False).get(path)
    assert (answer.status_code, answer["Retry-After"]) == (503, "1")
    assert "nothing was done" in answer.content.decode()
    assert "secret" not in answer.content.decode()
    assert path == "/away" or answer.json()["code"] == "busy"
