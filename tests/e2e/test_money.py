"""A person pays in, is declined first, comes back to a page that shows the money by itself, and reads the statement. On
a wide and a narrow screen, with the content security policy on and nothing in the browser's console."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
from django.conf import settings as django_settings
from pytest_django import Settings
from pytest_django.live_server_helper import LiveServer
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.support.expected_conditions import text_to_be_present_in_element, url_contains

from marketplace.accounts.models import Organisation, User
from marketplace.accounts.services import ensure_organisation
from marketplace.billing.invariants import breaches
from marketplace.billing.services.holds import cash, deposit, hold
from marketplace.billing.services.metering import close_meter, observe_beat, open_meter, report_usage
from marketplace.billing.tasks import drain_inbox
from marketplace.core.clock import database_now
from tests.e2e.conftest import patience, press
from tests.fakes.stripe import FakeStripe
from tests.servers import wait_until

pytestmark = [pytest.mark.prove, pytest.mark.django_db(transaction=True)]

PASSWORD = "correct horse battery"


@pytest.fixture
def stripe(live_server: LiveServer, settings: Settings) -> Iterator[FakeStripe]:
    """The provider's stand-in, set up as a deployment is: our pages may lead to its, and it reports to ours."""
    with FakeStripe(webhook_url=f"{live_server.url}/billing/stripe/webhook") as fake:
        settings.PUBLIC_URL = live_server.url
        settings.STRIPE_API_BASE, settings.STRIPE_SECRET_KEY = fake.url, fake.key
        settings.STRIPE_WEBHOOK_SECRETS = [fake.secret]
        directives = dict(django_settings.CONTENT_SECURITY_POLICY["DIRECTIVES"])
        directives["form-action"] = [directives["form-action"][0], fake.url]
        settings.CONTENT_SECURITY_POLICY = {"DIRECTIVES": directives}
        yield fake


def use_and_earn(ours: Organisation) -> None:
    """What a week of work leaves behind: a lease that was used, a job that holds its budget, an island that earned."""
    other = Organisation.objects.create(name="Nordic Islands")
    now = database_now()
    for ref, buyer, seller, minutes in ((f"lse_{'1' * 26}", ours, other, 42), (f"lse_{'2' * 26}", other, ours, 30)):
        if buyer == other:
            deposit(other, 50_000_000, "pi_other")
        held = hold(ref, buyer, 9_900_000)
        open_meter(
            ref,
            buyer=buyer,
            seller=seller,
            escrow=held,
            refund=cash(buyer),
            rate_uusd_per_gpu_hour=2_150_040,
            fee_bps=500,
            gpus=4,
            start_at=now,
            end_at=now + timedelta(hours=1),
        )
        for minute in range(minutes + 1):
            observe_beat(ref, now + timedelta(minutes=minute))
            report_usage(ref, 0, minute * 60_000 * 4)
        close_meter(ref)
    hold(f"job_{'0' * 26}", ours, 12_000_000)


def test_a_person_pays_in_and_reads_the_statement(
    live_server: LiveServer, browser: Chrome, stripe: FakeStripe, picture: Callable[[str], None]
) -> None:
    user = User.objects.create_user("ada@example.org", PASSWORD)
    ensure_organisation(user)
    wait = patience(browser)
    browser.get(f"{live_server.url}/accounts/login/?next=/money")
    browser.find_element(By.NAME, "login").send_keys(user.email)
    browser.find_element(By.NAME, "password").send_keys(PASSWORD)
    press(browser, "main button[type=submit]")
    wait.until(url_contains("/money"))
    picture("money-empty")

    browser.find_element(By.ID, "amount").send_keys("3")
    press(browser, "form.row .button")
    wait.until(text_to_be_present_in_element((By.ID, "amount-problem"), "Nothing was charged"))
    picture("money-refused")
    browser.find_element(By.ID, "amount").clear()
    browser.find_element(By.ID, "amount").send_keys("1,204.18")
    press(browser, "form.row .button")
    wait.until(url_contains(stripe.url))
    picture("pay")
    press(browser, "button[value=decline]")
    wait.until(url_contains("back=unpaid"))
    wait_until(lambda: len(stripe.delivered) == 1, limit_s=20, what="the refusal is told")
    drain_inbox()
    wait.until(text_to_be_present_in_element((By.ID, "top-up"), "Your card was declined."))
    picture("top-up-declined")

    press(browser, "#top-up .button")
    wait.until(url_contains(stripe.url))
    press(browser, "button[value=pay]")
    wait.until(url_contains("back=paid"))
    picture("top-up-waiting")
    wait_until(lambda: len(stripe.delivered) == 3, limit_s=20, what="the payment is told")
    drain_inbox()
    wait.until(text_to_be_present_in_element((By.ID, "top-up"), "You have $1,204.18 to spend"))
    picture("top-up-paid")

    use_and_earn(user.memberships.get().organisation)
    browser.get(f"{live_server.url}/money")
    assert "Usage" in browser.find_element(By.CSS_SELECTOR, "table.statement").text
    picture("money")
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    )
    browser.get(f"{live_server.url}/money")
    picture("money-dark")
    complaints = [entry["message"] for entry in browser.get_log("browser") if entry["level"] in {"SEVERE", "WARNING"}]
    # A refused form is a 422, which the browser writes down as it would a missing picture.
    assert [each for each in complaints if "422" not in each] == []
    assert breaches() == []
