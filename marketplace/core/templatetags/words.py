"""How pages write money, time, counts and states; every template has these filters without loading them.

Invariant: what is not stated is said in words and never shown as zero or an empty cell; money shows no more digits than
can be paid, with all of them on hover; a state is a word with a shape, and a colour only beside them.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from django import template
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.timezone import now as wall_clock

from marketplace.core.money import format_usd

register = template.Library()

NOT_STATED = "not stated"
FULL_DIGITS = 6
# What a state means to a reader: good, at work, to be looked at, bad, or over.
TONES = {
    "good": ("online", "active", "succeeded", "paid", "sealed", "live", "accepted", "filled", "done"),
    "busy": ("running", "finishing", "draining", "starting", "training", "open", "processing"),
    "warn": ("suspect", "waiting", "stopped", "expired", "late", "partly_kept"),
    "bad": ("lost", "failed", "refused", "revoked"),
}
_TONE_OF = {state: tone for tone, states in TONES.items() for state in states}
_STEPS = ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k"))
_AGES = ((86_400, "d"), (3_600, "h"), (60, "min"))


@register.filter
def usd(amount_uusd: int | None, digits: int = 2) -> str | SafeString:
    """ "$1,204.18", with every digit on hover; "<$0.01" for something that would otherwise be written as nothing."""
    if amount_uusd is None:
        return NOT_STATED
    least_uusd = 10 ** (FULL_DIGITS - digits)
    shown = f"<{format_usd(least_uusd, digits)}" if 0 < amount_uusd < least_uusd else format_usd(amount_uusd, digits)
    return format_html('<span class="usd" title="{}">{}</span>', format_usd(amount_uusd, FULL_DIGITS), shown)


@register.filter
def usd_text(amount_uusd: int | None) -> str:
    """The same where no markup may stand, as in an attribute."""
    return NOT_STATED if amount_uusd is None else format_usd(amount_uusd, 2)


@register.filter
def price(uusd_per_gpu_hour: int | None) -> str | SafeString:
    """ "$2.15 /GPU-h"."""
    if uusd_per_gpu_hour is None:
        return NOT_STATED
    return format_html(
        '<span class="usd" title="{}">{}</span> <span class="unit">/GPU-h</span>',
        format_usd(uusd_per_gpu_hour, FULL_DIGITS),
        format_usd(uusd_per_gpu_hour, 2),
    )


@register.filter
def utc(moment: datetime | None, form: str = "") -> str | SafeString:
    """ "1 Dec 2026 06:12 UTC", readable by programs too. `utc:"s"` shows the seconds; `utc:"brief"` is "06:12:09 UTC"
    today and "30 Nov 06:12 UTC" on any other day, with the whole date on hover."""
    if moment is None:
        return NOT_STATED
    at = moment.astimezone(UTC)
    day, title = f"{at.day} {at:%b %Y}", ago(moment)
    if form == "brief":
        today = at.date() == wall_clock().astimezone(UTC).date()
        shown, title = f"{at:%H:%M:%S}" if today else f"{at.day} {at:%b %H:%M}", f"{day}, {title}"
    else:
        shown = f"{day} {at:%H:%M:%S}" if form == "s" else f"{day} {at:%H:%M}"
    return format_html('<time datetime="{}" title="{}">{} UTC</time>', at.isoformat(timespec="seconds"), title, shown)


@register.filter
def ago(moment: datetime | None) -> str:
    """ "3 min ago", "in 2 h", "just now"."""
    return NOT_STATED if moment is None else distance(moment - wall_clock())


def distance(delta: timedelta) -> str:
    """A distance from now in words, of one unit: rough, and so never wrong by more than it says."""
    seconds = abs(int(delta.total_seconds()))
    if seconds < 10:
        return "just now"
    size, unit = next(((size, unit) for size, unit in _AGES if seconds >= size), (1, "s"))
    words = f"{seconds // size} {unit}"
    return f"in {words}" if delta > timedelta(0) else f"{words} ago"


@register.filter
def count(number: float | None) -> str:
    """ "1.5 M": three digits are enough to compare by."""
    if number is None:
        return NOT_STATED
    for size, letter in _STEPS:
        if abs(number) >= size:
            return f"{number / size:.3g} {letter}"
    return f"{round(number):,}"


@register.filter
def size(number_of_bytes: int | None) -> str:
    """ "1.9 MB", in powers of ten."""
    if number_of_bytes is None:
        return NOT_STATED
    value = float(number_of_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


@register.filter
def gpu_time(gpu_ms: int | None) -> str:
    """GPU-milliseconds as people say them: "42 GPU-s", "3.2 GPU-h"."""
    if gpu_ms is None:
        return NOT_STATED
    seconds = gpu_ms / 1000
    if seconds < 120:
        return f"{seconds:.0f} GPU-s"
    return f"{seconds / 60:.1f} GPU-min" if seconds < 7200 else f"{seconds / 3600:,.1f} GPU-h"


@register.filter
def stated(value: object, words: str = NOT_STATED) -> object:
    """The value, or in words that there is none. Zero is a value."""
    return words if value is None or value == "" else value


@register.simple_tag
def state(value: str, label: str = "") -> SafeString:
    """A state as a badge: `{% state island.state island.get_state_display %}`."""
    return format_html('<span class="badge {}">{}</span>', _TONE_OF.get(value, "idle"), label or value)
