"""The sealing keys: what they sealed and signed is opened and accepted by them alone, also while they are rotated."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography.fernet import Fernet
from pydantic import SecretStr

from leasehold.domain.errors import Unavailable
from leasehold.file_secrets import FileSecret
from leasehold.security.sealing import Sealing, Unsealable
from leasehold.settings import Settings

OLD, NEW, OTHER = (Fernet.generate_key().decode() for _ in range(3))
PURPOSE, TEXT = "callback", b"of one job"


def sealing(*keys: str) -> Sealing:
    return Sealing(Settings(_env_file=None, sealing_keys=SecretStr(", ".join(keys))))


def test_a_sealed_secret_shows_nothing_and_only_a_key_of_the_installation_opens_it() -> None:
    sealed = sealing(OLD).seal(b"a secret")
    assert b"a secret" not in sealed
    assert sealing(OLD).open(sealed) == b"a secret"
    for keys, damaged in (([OTHER], sealed), ([OLD], sealed[:40]), ([OLD], b"")):
        with pytest.raises(Unsealable):
            sealing(*keys).open(damaged)


def test_a_signature_is_of_its_text_its_purpose_and_its_key_alone() -> None:
    signed = sealing(OLD).sign(PURPOSE, TEXT)
    assert signed == sealing(OLD).sign(PURPOSE, TEXT)
    assert sealing(OLD).verifies(PURPOSE, TEXT, signed)
    for keys, purpose, text, signature in (
        ([OTHER], PURPOSE, TEXT, signed),
        ([OLD], "another", TEXT, signed),
        ([OLD], PURPOSE, b"of another job", signed),
        ([OLD], PURPOSE, TEXT, signed[:-1]),
        ([OLD], PURPOSE, TEXT, ""),
        ([OLD], PURPOSE, TEXT, "\u00fc"),  # a caller may send anything
    ):
        assert not sealing(*keys).verifies(purpose, text, signature)


def test_while_keys_are_rotated_the_first_seals_and_signs_and_each_opens_and_verifies() -> None:
    sealed, signed = sealing(OLD).seal(b"a secret"), sealing(OLD).sign(PURPOSE, TEXT)
    both = sealing(NEW, OLD)
    assert both.open(sealed) == b"a secret"
    assert both.verifies(PURPOSE, TEXT, signed)
    assert sealing(NEW).open(both.seal(b"another")) == b"another"
    assert sealing(NEW).verifies(PURPOSE, TEXT, both.sign(PURPOSE, TEXT))
    with pytest.raises(Unsealable):
        sealing(NEW).open(sealed)  # the old key is gone
    assert not sealing(NEW).verifies(PURPOSE, TEXT, signed)


@pytest.mark.parametrize("setting", ["", " , "])
def test_without_a_key_nothing_is_sealed_opened_signed_or_accepted(setting: str) -> None:
    without = sealing(setting)
    assert not without.has_key
    assert sealing(OLD).has_key
    sealing(OLD).require()
    for use in (
        without.require,
        lambda: without.seal(b"a secret"),
        lambda: without.open(b""),
        lambda: without.sign(PURPOSE, TEXT),
        lambda: without.verifies(PURPOSE, TEXT, ""),
    ):
        with pytest.raises(Unavailable) as refused:
            use()
        assert refused.value.code == "sealing_not_configured"


def test_what_is_not_a_key_is_refused_at_the_start() -> None:
    with pytest.raises(ValueError, match="Fernet"):
        sealing(OLD, "not a key")


def test_a_changed_file_of_keys_holds_from_then_on_and_a_broken_one_never(tmp_path: Path) -> None:
    path = tmp_path / "keys"

    def write(text: str) -> None:
        new = tmp_path / "new"  # in its place: two writes within a tick of the clock may look the same
        new.write_text(text)
        new.replace(path)

    write(OLD)
    kept = Sealing(Settings(_env_file=None).model_copy(update={"sealing_keys": FileSecret(path)}))
    sealed, signed = kept.seal(b"a secret"), kept.sign(PURPOSE, TEXT)
    write("not a key")
    assert kept.open(sealed) == b"a secret"
    assert kept.verifies(PURPOSE, TEXT, signed)
    write(f"{NEW},{OLD}")
    assert kept.open(sealed) == b"a secret"
    assert kept.sign(PURPOSE, TEXT) == sealing(NEW).sign(PURPOSE, TEXT)
    write(NEW)
    assert not kept.verifies(PURPOSE, TEXT, signed)
    with pytest.raises(Unsealable):
        kept.open(sealed)
