"""The signature of a webhook, by the specification: each part of a message is signed."""

from __future__ import annotations

import base64

import pytest

from leasehold.security.signing import new_secret, secret_text, signature

#: The example of github.com/standard-webhooks/standard-webhooks, whose libraries all have it in their tests.
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
KEY = base64.b64decode(SECRET.removeprefix("whsec_"))
ID, TIMESTAMP, BODY = "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}'
SIGNED = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_it_is_the_specifications() -> None:
    assert signature([KEY], ID, TIMESTAMP, BODY) == SIGNED


@pytest.mark.parametrize(
    ("message_id", "timestamp", "body", "key"),
    [
        ("msg_other", TIMESTAMP, BODY, KEY),
        (ID, TIMESTAMP + 1, BODY, KEY),
        (ID, TIMESTAMP, BODY + b" ", KEY),
        (ID, TIMESTAMP, b"", KEY),
        (ID, TIMESTAMP, BODY, KEY[:-1]),
        (ID + ".1", TIMESTAMP, BODY, KEY),
    ],
)
def test_another_part_has_another_signature(message_id: str, timestamp: int, body: bytes, key: bytes) -> None:
    assert signature([key], message_id, timestamp, body) != SIGNED


def test_each_key_of_a_rotation_signs_and_the_newest_first() -> None:
    newer = bytes(32)
    assert signature([newer, KEY], ID, TIMESTAMP, BODY) == f"{signature([newer], ID, TIMESTAMP, BODY)} {SIGNED}"


def test_a_secret_is_shown_as_its_owners_library_wants_it() -> None:
    assert secret_text(KEY) == SECRET
    assert len({new_secret() for _ in range(10)}) == 10
    assert len(new_secret()) == 32
