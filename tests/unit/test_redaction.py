"""What no log line may hold, in whatever form it comes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from urllib.parse import quote

import pytest
from pydantic import SecretStr

from leasehold.settings import Settings
from leasehold.telemetry import redaction

SECRET = 'qu"ote\\and/sla+sh-é'


@pytest.fixture(autouse=True)
def learnt() -> Iterator[None]:
    redaction.learn(
        Settings(
            _env_file=None,
            database_url=SecretStr("postgresql://someone:pass%2Fword-db@db.example:5432/x"),
            s3_secret_key=SecretStr(SECRET),
            sealing_keys=SecretStr("newest-sealing-key=, older-sealing-key="),
            cells_keys=SecretStr('{"production": "a-key-of-a-cell"}'),
            generation_credentials={"jimeng": SecretStr("an-access-id:its-secret-part")},
        )
    )
    yield
    redaction.learn(Settings(_env_file=None))


@pytest.mark.parametrize(
    "said",
    [
        "the password is pass/word-db",
        "postgresql://someone:pass%2Fword-db@db.example:5432/x",
        f"key {SECRET}",
        "the key newest-sealing-key= opens nothing",
        "nor does older-sealing-key=",
        "refused: a-key-of-a-cell",
        "signed with its-secret-part",
        json.dumps({"error": SECRET}),
        json.dumps({"error": SECRET}, ensure_ascii=False),
        f"https://s3/x?secret={quote(SECRET, safe='')}",
    ],
)
def test_a_secret_of_the_settings_is_taken_out_in_every_form(said: str) -> None:
    redacted = redaction.redact(said)
    assert redaction.REDACTED in redacted
    assert not any(
        part in redacted
        for part in ("pass/word", "pass%2F", "quote", "sla+", "sealing-key", "of-a-cell", "secret-part")
    )


def test_the_name_of_a_cell_is_no_secret() -> None:
    assert redaction.redact("the cell production is silent") == "the cell production is silent"


@pytest.mark.parametrize(
    ("said", "left"),
    [
        ("amqp://u:canary@h:5672/v", "amqp://u:[redacted]@h:5672/v"),
        ("GET https://s3/b/k?X-Amz-Signature=canary&X-Amz-Expires=5", "GET https://s3/b/k?X-Amz-Signature=[redacted]&X-Amz-Expires=5"),
        (f"lh_{'a' * 12}_{'B' * 43}", f"lh_{'a' * 12}_[redacted]"),
        ("Authorization: Bearer canary-canary", "Authorization: Bearer [redacted]"),
    ],
)  # fmt: skip
def test_a_secret_of_anybody_else_is_known_by_its_form(said: str, left: str) -> None:
    assert redaction.redact(said) == left


@pytest.mark.parametrize("said", ["leasehold", "leasehold-secret is the default", "job 1 of media: 10:30@noon", ""])
def test_innocent_text_stays(said: str) -> None:
    assert redaction.redact(said) == said


@pytest.mark.parametrize("parameter", ["password=pass%2Fword+db", "sslmode=require&SSLPASSWORD=pass%2Fword+db"])
def test_a_password_among_the_parameters_of_a_url_is_a_secret(parameter: str) -> None:
    url = f"postgresql://someone@db.example/x?application_name=some-application&{parameter}"
    redaction.learn(Settings(_env_file=None, database_url=SecretStr(url)))
    for form in ("pass%2Fword+db", "pass/word+db", "pass/word db"):
        assert redaction.redact(f"refused: {form}") == "refused: [redacted]"
    assert redaction.redact("some-application") == "some-application"


@pytest.mark.parametrize(
    ("secret", "recognisable"),
    [
        ("its-secret-part", "its-sec"),
        ("postgresql://stranger:hunter22@db.example/x", "hunter"),
        ("a pass phrase", "a pass"),
        ("?X-Amz-Signature=0123456789abcdef", "0123"),
    ],
)
def test_a_secret_is_not_left_in_half_at_the_end_of_a_long_text(secret: str, recognisable: str) -> None:
    redaction.learn(
        Settings(
            _env_file=None, s3_secret_key=SecretStr("a pass phrase"), sealing_keys=SecretStr("an-id:its-secret-part")
        )
    )
    for length in range(len(secret) + 1):
        start = redaction.redact_start("The key is " + secret + " and more" * 9, len("The key is ") + length)
        assert start.startswith("The key")
        assert recognisable not in start
    assert redaction.redact_start("its-secret-part " * 9, 40) == f"{redaction.REDACTED} {redaction.REDACTED}"


def test_a_long_text_keeps_all_but_the_word_that_the_cut_divides() -> None:
    assert redaction.redact_start("one two three", 13) == "one two three"
    assert redaction.redact_start("one two three", 9) == "one two"
    assert redaction.redact_start("onetwothree", 9) == "onetwothr"
