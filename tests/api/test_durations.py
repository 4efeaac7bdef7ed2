"""Durations as people write them: what Polars takes means what it means there, words are those of Spark."""

from __future__ import annotations

import datetime as dt
import math

import polars as pl
import pytest

import cutwater as cw
from cutwater.api.steps.build import duration_us
from cutwater.config import format_us, parse_duration_ms
from cutwater.errors import BuildError, ConfigError

POLARS = ("1us", "500ms", "10s", "1m", "90m", "2h", "1d", "1w", "1h30m", "1d12h", "3d12h4m25s")
WRITTEN = {
    "1 minute": dt.timedelta(minutes=1),
    "10 seconds": dt.timedelta(seconds=10),
    "1 second": dt.timedelta(seconds=1),
    "500 ms": dt.timedelta(milliseconds=500),
    "100 milliseconds": dt.timedelta(milliseconds=100),
    "5 microseconds": dt.timedelta(microseconds=5),
    "5 \u00b5s": dt.timedelta(microseconds=5),
    "2 hours": dt.timedelta(hours=2),
    "1 hour 30 minutes": dt.timedelta(minutes=90),
    "1 DAY": dt.timedelta(days=1),
    "2 Weeks": dt.timedelta(weeks=2),
    "interval 10 minutes": dt.timedelta(minutes=10),
    "INTERVAL 1 hour": dt.timedelta(hours=1),
    "5 mins": dt.timedelta(minutes=5),
    "1.5h": dt.timedelta(minutes=90),
    " 1 h ": dt.timedelta(hours=1),
}


@pytest.mark.parametrize("text", POLARS)
def test_what_polars_takes_means_the_same(text):
    start = dt.datetime(2026, 1, 1)
    end = pl.Series([start]).dt.offset_by(text)[0]
    assert duration_us(text, "size") == (end - start) // dt.timedelta(microseconds=1)


@pytest.mark.parametrize("text", WRITTEN)
def test_words_are_taken(text):
    assert duration_us(text, "size") == WRITTEN[text] // dt.timedelta(microseconds=1)
    assert duration_us(WRITTEN[text], "size") == duration_us(text, "size")


def test_a_sign_is_one_for_the_whole():
    assert duration_us("-1 hour 30 minutes", "within", signed=True) == -5_400_000_000
    assert duration_us(format_us(-5_400_000_000), "within", signed=True) == -5_400_000_000


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1 month", ["month has no fixed length", "30d"]),
        ("1mo", ["month has no fixed length"]),
        ("2 years", ["year has no fixed length"]),
        ("1q", ["quarter has no fixed length"]),
        ("1M", ["may be minutes or months", "'min'"]),
        ("500ns", ["finer than the clock", "'us'"]),
        ("1H", ["no unit 'H'", "Did you mean 'h'?"]),
        ("1 fortnight", ["no unit 'fortnight'", "10 minutes"]),
        ("10", ["not a duration", "'10s' or '10ms'"]),
        ("00:10:00", ["not a duration"]),
        ("1 hour -30 minutes", ["not a duration"]),
        ("1h 30", ["not a duration"]),
        ("", ["not a duration"]),
        (math.nan, ["not a duration"]),
        (math.inf, ["not a duration"]),
    ],
)
def test_what_is_none_or_ambiguous_is_refused_in_words(text, words):
    with pytest.raises(ConfigError) as caught:
        parse_duration_ms(text, name="interval_ms" if isinstance(text, float) else "interval")
    for word in ("interval", *words):
        assert word in str(caught.value)


def test_every_place_that_takes_a_duration_takes_words():
    rows = cw.Dataflow("d").read("r", cw.rate(1, rows=1), event_time="timestamp", out_of_order="1 minute")
    keyed = rows.key_by("value")
    windows = keyed.window("w", cw.sliding("1 hour", "10 minutes"), early=cw.every(event_time="1 minute"))
    windows.aggregate("n", n=cw.count())
    keyed.join("j", rows.key_by("value"), within=("-1 hour", "2 hours"))
    keyed.deduplicate("once", within="1 day")
    cw.files("out", roll_interval_ms="10 seconds").as_sink()
    with pytest.raises(BuildError, match="month has no fixed length"):
        cw.tumbling("1 month")
