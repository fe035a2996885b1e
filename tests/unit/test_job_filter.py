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


@pytest.mark.parametrize("value", ["a", "HTTP 503", "_x", "auth0|5", "a/b", 'say "no"', "back\\slash", "ключ", " "])
def test_any_code_and_any_tenant_can_be_named(value: str) -> None:
    """A handler chooses its codes freely, and an installation its tenants."""
    term = quoted(value)
    wanted = parse(f"code:{term} tenant:{term} status:failed", NOW)
    assert (wanted.code, wanted.tenant, wanted.status, wanted.texts) == (value, value, "failed", ())
    assert (term == value) is (value not in ("HTTP 503", 'say "no"', " "))  # quotes only where they are needed


def test_a_length_has_two_ends() -> None:
    assert parse("waited:>10m waited:<2h", NOW).waited == Range(600.0, 7200.0)
    assert parse("duration:<5s", NOW).duration == Range(None, 5.0)


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


@pytest.mark.parametrize("text", ["", "   ", "1970", "tag.a:1 tag.a:1", "http//x", "a.b"])
def test_what_is_no_error(text: str) -> None:
    parse(text, NOW)
