"""The filter language: what it means, and where an error stands."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from leasehold.domain.job_filter import InvalidFilter, Range, parse, quoted

NOW = datetime(2026, 11, 22, 12, tzinfo=UTC)


def test_terms_become_fields() -> None:
    text = 'kind:media status:failed tag.customer:7 code:step_timeout "no space" payload./a/b~1c:"x \\" y"'
    wanted = parse(text, NOW)
    assert (wanted.kind, wanted.status, wanted.code) == ("media", "failed", "step_timeout")
    assert wanted.tags == (("customer", "7"),)
    assert wanted.texts == ("no space",)
    assert wanted.payload == ((("a", "b/c"), 'x " y'),)
    assert parse('"two\\\nlines"', NOW).texts == ("two\nlines",)  # an escaped end of a line is one, too


@pytest.mark.parametrize(
    ("text", "after", "before"),
    [
        ("created:<1h", NOW - timedelta(hours=1), None),
        ("created:>2h", None, NOW - timedelta(hours=2)),
        ("created:>2h created:<1d", NOW - timedelta(days=1), NOW - timedelta(hours=2)),
        ("created:>2026-11-20", datetime(2026, 11, 20, tzinfo=UTC), None),
        ("created:<2026-11-20T10:00:00+02:00", None, datetime(2026, 11, 20, 8, tzinfo=UTC)),
        ("created:<999999w", datetime(1970, 1, 1, tzinfo=UTC), None),
    ],
)
def test_an_age_counts_back_from_now_and_a_date_does_not(
    text: str, after: datetime | None, before: datetime | None
) -> None:
    wanted = parse(text, NOW)
    assert (wanted.created_after, wanted.created_before) == (after, before)


@pytest.mark.parametrize(
    "value", ["a", "HTTP 503", "_x", "auth0|5", "a/b", 'say "no"', "back\\slash", "ключ", " ", "\\ \\", "two\nlines"]
)
def test_any_code_and_any_tenant_can_be_named(value: str) -> None:
    """A handler chooses its codes freely, and an installation its tenants."""
    term = quoted(value)
    wanted = parse(f"code:{term} tenant:{term} status:failed", NOW)
    assert (wanted.code, wanted.tenant, wanted.status, wanted.texts) == (value, value, "failed", ())
    needs_quotes = value in ("HTTP 503", 'say "no"', " ", "\\ \\", "two\nlines")
    assert (term != value) is needs_quotes


def test_a_length_has_two_ends() -> None:
    assert parse("waited:>10m waited:<2h", NOW).waited == Range(600.0, 7200.0)
    assert parse("waited:<2h waited:>10m", NOW).waited == Range(600.0, 7200.0)
    assert parse("duration:<5s", NOW).duration == Range(None, 5.0)
    for length, seconds in (("999999s", 999_999), ("1m", 60), ("1h", 3600), ("1d", 86_400), ("1w", 604_800)):
        assert parse(f"duration:>{length}", NOW).duration == Range(float(seconds), None)


def test_what_a_caller_refuses_stands_at_the_first_of_its_terms() -> None:
    wanted = parse("kind:media text payload./a:1 payload./b:2 other", NOW)
    positions = {key: wanted.refused(key, "no").position for key in ("kind", "text", "payload", "worker")}
    assert positions == {"kind": 1, "text": 12, "payload": 17, "worker": 1}


@pytest.mark.parametrize(("key", "most"), [("kind", 63), ("queue", 200), ("template", 200)])
def test_a_name_is_not_longer_than_any_that_there_is(key: str, most: int) -> None:
    parse(f"{key}:{'a' * most}", NOW)
    with pytest.raises(InvalidFilter):
        parse(f"{key}:{'a' * (most + 1)}", NOW)


@pytest.mark.parametrize(
    ("text", "position"),
    [
        ("foo:1", 1),
        ("kind:media  foo:1", 13),
        ("kind:", 6),
        ("kind: media", 6),
        ("kind:media kind:run", 12),
        ("kind.x:media", 1),
        ("kind:MEDIA", 6),
        ("status:bad", 8),
        ('"open', 1),
        ('""', 1),
        ('"a"b', 4),
        ('a"b', 2),
        ("created:2h", 9),
        ("created:>", 10),
        ("created:>x", 10),
        ("created:>9999-01-01", 10),
        ("created:>1969-12-31", 10),
        ("created:<9999999w", 10),
        ("created.x:>1h", 1),
        ("waited.x:>1h", 1),
        ("waited:>5", 9),
        ("waited:>1h waited:>2h", 12),
        ("worker:me", 8),
        ("tag.X:1", 1),
        ("tag:1", 1),
        ("tag.a:1 tag.a:2", 9),
        ("payload.a:1", 1),
        ("a " * 20 + "b", 41),
        ("a" * 1001, 1001),
    ],
)
def test_an_error_stands_at_a_character(text: str, position: int) -> None:
    with pytest.raises(InvalidFilter) as refused:
        parse(text, NOW)
    assert refused.value.position == position
    assert str(refused.value).startswith(f"At character {position}: ")


@pytest.mark.parametrize("text", ["", "   ", "1970", "tag.a:1 tag.a:1", "http//x", "a.b", "a" * 1000, "a " * 20])
def test_what_is_no_error(text: str) -> None:
    parse(text, NOW)
