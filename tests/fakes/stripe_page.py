"""The pages of the stand-in: where a person pays, and where a seller says who they are."""

from __future__ import annotations

from html import escape
from typing import Any

PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="color-scheme" content="light dark">
<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">
<title>{title} · payment page of this machine</title><style>
body {{ margin: 0; min-height: 100vh; display: grid; place-items: center; padding: 16px; box-sizing: border-box;
  font: 15px/1.5 system-ui, sans-serif; background: light-dark(#f6f7f7, #101314); color: light-dark(#16191a, #e9edee) }}
main {{ width: min(400px, 100%); padding: 32px; box-sizing: border-box; background: light-dark(#fff, #171b1c);
  border: 1px solid light-dark(#dde1e2, #2a3032); border-radius: 8px }}
h1 {{ margin: 4px 0 0; font-size: 36px; line-height: 44px; font-weight: 620; font-variant-numeric: tabular-nums }}
p {{ margin: 0; color: light-dark(#566063, #9ba6a9) }}
form {{ display: grid; gap: 12px; margin: 24px 0 16px }}
button {{ min-height: 44px; font: inherit; font-weight: 550; border-radius: 6px; cursor: pointer;
  border: 1px solid transparent; background: light-dark(#0b6e6e, #57c7c3); color: light-dark(#fff, #062222) }}
button.quiet {{ background: none; color: inherit; border-color: light-dark(#868f92, #6d777a) }}
a {{ color: light-dark(#0b6e6e, #57c7c3) }} small {{ display: block; margin-top: 24px; color: inherit }}
</style></head><body><main>{body}</main></body></html>"""


def payment_page(session: dict[str, Any] | None, problem: str = "") -> tuple[int, str]:
    if session is None:
        return 404, PAGE.format(title="Not found", body="<p>There is nothing to pay here.</p>")
    cents = session["amount_total"]
    amount = f"${cents // 100:,}.{cents % 100:02d}"
    back = escape(session["cancel_url"] or session["success_url"], quote=True)
    if session["status"] != "open":
        said = "This payment is done." if session["status"] == "complete" else "This payment page has expired."
        return 200, PAGE.format(title=amount, body=f'<p>{said}</p><p><a href="{back}">Back to Archipelago</a></p>')
    body = f"""<p>Top-up</p><h1>{amount}</h1>{f'<p role="alert">{escape(problem)}</p>' if problem else ""}
<form method="post"><button name="button" value="pay">Pay {amount}</button>
<button class="quiet" name="button" value="decline">Pay with a card that is declined</button></form>
<p><a href="{back}">Back without paying</a></p>
<p><small>A stand-in for Stripe that runs on this machine. No card is charged.</small></p>"""
    return 200, PAGE.format(title=amount, body=body)


def onboarding_page(link: dict[str, Any] | None) -> tuple[int, str]:
    if link is None or link["used"]:
        return 410, PAGE.format(title="Link expired", body="<p>This link was used, or has expired.</p>")
    body = """<p>Payouts</p><h1>Who are you?</h1>
<form method="post"><button name="button" value="done">I am a seller with a bank account</button></form>
<p><small>A stand-in for Stripe that runs on this machine. Nobody is asked for anything.</small></p>"""
    return 200, PAGE.format(title="Set up payouts", body=body)
