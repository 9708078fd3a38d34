"""Names to ids, prices to micro-USD, and what is missing stays missing."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marketplace.catalog.feeds.list_prices import DATA, rows_of
from marketplace.catalog.normalise import (
    Alias,
    AliasTable,
    decimal_or_none,
    offer_uid,
    price_uusd_per_gpu_hour,
    stock_lower_bound,
)

ROWS = list(rows_of(DATA / "gpu_aliases.csv"))
TABLE = AliasTable(
    Alias(r["raw_name"], decimal_or_none(r["raw_vram_gib"]), r["raw_link"], r["gpu"], tuple(r["flags"].split(";")))
    for r in ROWS
)


@pytest.mark.parametrize("row", ROWS, ids=lambda r: f"{r['raw_name']}|{r['raw_vram_gib']}|{r['raw_link']}")
def test_every_known_spelling_means_its_canonical_gpu(row: dict[str, str]) -> None:
    match = TABLE.find(row["raw_name"], decimal_or_none(row["raw_vram_gib"]), row["raw_link"])
    assert match is not None
    assert match.gpu == row["gpu"]


def test_every_list_price_names_a_known_gpu() -> None:
    for row in rows_of(DATA / "list_prices.csv"):
        assert TABLE.find(row["gpu_name"], decimal_or_none(row["vram"]), row["link"]) is not None, row


def test_vram_printed_a_little_off_is_the_same_gpu_and_says_so() -> None:
    match = TABLE.find("nvidia_geforce_rtx_4090", Decimal("23.5"), "PCIe")
    assert match is not None
    assert match.gpu == "rtx4090-pcie-24g"
    assert "vram_rounded" in match.flags


def test_h100_without_a_link_has_no_guessed_form_factor() -> None:
    match = TABLE.find("H100", Decimal(80), "")
    assert match is not None
    assert match.gpu == "h100-unknown-80g"
    assert "form_factor_unknown" in match.flags


def test_an_unknown_name_has_no_gpu() -> None:
    assert TABLE.find("RTX 9090", Decimal(64), "PCIe") is None
    assert TABLE.find("NVIDIA H100 SXM", None, "SXM") is None


def test_one_spelling_cannot_mean_two_gpus() -> None:
    with pytest.raises(ValueError, match="means both"):
        AliasTable([Alias("H100", None, "", "h100-sxm-80g"), Alias("h100", None, "", "h100-pcie-80g")])


@given(st.integers(0, 10**10), st.integers(1, 16))
def test_float_noise_below_half_a_micro_dollar_does_not_change_a_price(uusd: int, gpus: int) -> None:
    exact = Decimal(uusd * gpus) / 10**6
    for noise in (Decimal("-2e-16"), Decimal(0), Decimal("2e-16")):
        stated = max(Decimal(0), exact + noise)
        assert price_uusd_per_gpu_hour(str(stated), gpus) == uusd


def test_a_price_with_float_noise_is_the_price_that_was_meant() -> None:
    assert price_uusd_per_gpu_hour("1.6567999999999998") == 1_656_800


@given(st.one_of(st.none(), st.just(""), st.just("  "), st.just("n/a"), st.just("NaN"), st.just("-Infinity")))
def test_a_missing_price_or_stock_is_never_zero(text: str | None) -> None:
    assert price_uusd_per_gpu_hour(text) is None
    assert decimal_or_none(text) is None
    assert stock_lower_bound(text if text != "NaN" else None) is None


@given(st.decimals(max_value=Decimal("-0.000001"), allow_nan=False, allow_infinity=False))
def test_a_negative_price_is_no_price(value: Decimal) -> None:
    assert price_uusd_per_gpu_hour(value) is None


@pytest.mark.parametrize(("text", "least"), [("200+", 200), ("Low", 1), (3, 3), ("Unavailable", 0), ("soon", None)])
def test_stock_is_a_lower_bound(text: str | int, least: int | None) -> None:
    assert stock_lower_bound(text) == least


@given(st.lists(st.text(max_size=8), min_size=4, max_size=4), st.integers(1, 16))
def test_an_offer_is_known_by_its_shape(parts: list[str], gpus: int) -> None:
    channel, sku, region, tier = parts
    uid = offer_uid(channel, sku, region, gpus, "on_demand", tier)
    assert uid == offer_uid(channel, sku, region, gpus, "on_demand", tier)
    assert uid != offer_uid(channel, sku, region, gpus + 1, "on_demand", tier)
    assert uid != offer_uid(channel, sku, region, gpus, "spot_fixed", tier)
