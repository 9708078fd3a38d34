"""What the forms of pages have in common: a minute as browsers give it, and a service's refusal put where it belongs.

Invariant: a refusal is never lost: what it says of a field that is shown stands at that field, and the rest above.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django import forms

from marketplace.core.errors import Problem

MINUTE_FORMAT = "%Y-%m-%dT%H:%M"


def minute_field(**options: Any) -> forms.DateTimeField:
    """To the minute, in UTC, as a browser's own field gives it."""
    widget = forms.DateTimeInput(format=MINUTE_FORMAT, attrs={"type": "datetime-local"})
    return forms.DateTimeField(widget=widget, input_formats=[MINUTE_FORMAT, "%Y-%m-%dT%H:%M:%S"], **options)


def put_on(form: forms.Form, problem: Problem, field_of: Mapping[str, str] | None = None) -> None:
    """The refusal at the fields it names. `field_of` says where a service's field stands in the form, if elsewhere."""
    shown = {name for name, field in form.fields.items() if not field.widget.is_hidden}
    placed = False
    for each in problem.fields:
        name = (field_of or {}).get(each.field, each.field)
        if name in shown:
            form.add_error(name, each.message)
            placed = True
    if not placed:
        form.add_error(None, problem.message)
