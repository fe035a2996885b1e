"""LEASEHOLD_NAME_FILE: secrets that lie in files, and change while a process runs."""

from __future__ import annotations

from base64 import b64encode
from pathlib import Path

import pytest
import structlog
from cryptography.fernet import Fernet
from pydantic import SecretStr, ValidationError

from leasehold.broker.amqp.connection import Nodes
from leasehold.file_secrets import MAX_BYTES, FileSecret, holds_secrets
from leasehold.pipelines.generation.providers import Catalogue
from leasehold.security.sealing import Sealing, Unsealable
from leasehold.settings import Settings
from leasehold.telemetry import redaction


def replace(path: Path, text: str) -> None:
    """As Kubernetes does it: another file is put in the place of the old one."""
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    fresh.replace(path)


@pytest.mark.parametrize(
    "name", [name for name, field in Settings.model_fields.items() if holds_secrets(field.annotation)]
)
def test_every_secret_may_lie_in_a_file(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / name
    secret = b64encode(bytes(32)).decode()  # also a signing key, which is checked
    text = secret if name == "conversion_signing_key" else f'{{"ark": "{secret}"}}'
    path.write_text(f"{text}\n")
    monkeypatch.setenv(f"LEASEHOLD_{name.upper()}_FILE", str(path))
    value = getattr(Settings(_env_file=None), name)
    if isinstance(value, SecretStr):
        assert value.get_secret_value() == text
    else:
        assert {key: each.get_secret_value() for key, each in value.items()} == {"ark": secret}
    assert secret not in repr(value)


def test_a_setting_that_is_no_secret_is_not_read_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "port").write_text("1")
    monkeypatch.setenv("LEASEHOLD_API_PORT_FILE", str(tmp_path / "port"))
    assert Settings(_env_file=None).api_port == 8000


def test_a_secret_follows_its_file_and_survives_a_bad_moment_of_it(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("first\n")
    secret = FileSecret(path)
    for _ in range(2):
        replace(path, "second")
        assert secret.get_secret_value() == "second"
        replace(path, " \n")
        assert secret.get_secret_value() == "second"
        path.unlink()
        assert secret.get_secret_value() == "second"
        path.write_bytes(b"\xff\xfe")
        assert secret.get_secret_value() == "second"
    replace(path, "third!")
    assert secret.get_secret_value() == "third!"


def test_a_part_that_cannot_use_a_new_value_keeps_no_other_part_from_it(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("old")
    secret, seen = FileSecret(path), list[str]()

    def refuse() -> None:
        seen.append("refused")
        raise ValueError("not a map")

    secret.on_change(refuse)
    secret.on_change(lambda: seen.append(secret.get_secret_value()))
    path.write_text("newer")
    with structlog.testing.capture_logs() as logged:
        assert secret.get_secret_value() == "newer"
    assert seen == ["refused", "newer"]
    assert [line["error"] for line in logged if line["log_level"] == "warning"] == ["ValueError"]


def test_a_file_that_keeps_its_size_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("aaaa")
    secret = FileSecret(path)
    replace(path, "bbbb")
    assert secret.get_secret_value() == "bbbb"


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "No such file"), ("", "empty"), ("x" * (MAX_BYTES + 1), "more than 1048576 bytes"), (b"\xff\xfe", "utf-8")],
)
def test_a_file_that_cannot_be_used_at_the_start_ends_it_and_is_named(
    content: str | bytes | None, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "url"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    monkeypatch.setenv("LEASEHOLD_DATABASE_URL_FILE", str(path))
    with pytest.raises(ValidationError, match=f"LEASEHOLD_DATABASE_URL_FILE: .*{reason}"):
        Settings(_env_file=None)


def test_a_variable_and_its_file_contradict_one_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "key").write_text("from a file")
    monkeypatch.setenv("LEASEHOLD_S3_SECRET_KEY_FILE", str(tmp_path / "key"))
    monkeypatch.setenv("LEASEHOLD_S3_SECRET_KEY", "from the variable")
    with pytest.raises(ValidationError, match="LEASEHOLD_S3_SECRET_KEY and LEASEHOLD_S3_SECRET_KEY_FILE are both set"):
        Settings(_env_file=None)


def test_a_file_that_the_environment_names_goes_before_a_value_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "key").write_text("from a file")
    (tmp_path / ".env").write_text("leasehold_s3_secret_key=of the folder\nLEASEHOLD_S3_ACCESS_KEY=of the folder\n")
    monkeypatch.setenv("LEASEHOLD_S3_SECRET_KEY_FILE", str(tmp_path / "key"))
    settings = Settings()
    assert settings.s3_secret_key.get_secret_value() == "from a file"
    assert settings.s3_access_key.get_secret_value() == "of the folder"


def test_a_mapping_of_secrets_must_be_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "credentials").write_text("secret-that-is-no-json")
    monkeypatch.setenv("LEASEHOLD_GENERATION_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    with pytest.raises(ValidationError, match="is not JSON") as failure:
        Settings(_env_file=None)
    assert "secret-that" not in str(failure.value)


def test_each_secret_of_a_mapping_follows_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "credentials"
    path.write_text('{"ark": "first", "fal": "same"}')
    monkeypatch.setenv("LEASEHOLD_GENERATION_CREDENTIALS_FILE", str(path))
    catalogue = Catalogue(Settings(_env_file=None))

    def credentials() -> tuple[str | None, ...]:
        found = (catalogue.credential(name) for name in ("ark", "fal"))
        return tuple(None if secret is None else secret.get_secret_value() for secret in found)

    assert credentials() == ("first", "same")
    replace(path, '{"ark": "second", "fal": "same"}')
    assert credentials() == ("second", "same")
    for unusable in ("no JSON", "[]", '{"ark": 7, "fal": ""}'):
        replace(path, unusable)
        assert credentials() == ("second", "same")
    replace(path, '{"fal": "new"}')
    assert credentials() == ("second", "new")  # the set of providers is that of the start


@pytest.mark.parametrize("value", ["[]", '{"ark": 7}', '{"ark": null}'])
def test_a_mapping_of_another_form_is_refused_at_the_start(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "credentials").write_text(value)
    monkeypatch.setenv("LEASEHOLD_GENERATION_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    with pytest.raises(ValidationError, match="generation_credentials"):
        Settings(_env_file=None)


def test_a_log_line_holds_no_secret_of_a_mapping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "_secrets", ())
    redaction.learn(Settings(_env_file=None, generation_credentials={"ark": SecretStr("from-a-variable")}))
    assert redaction.redact("it is from-a-variable") == "it is [redacted]"
    path = tmp_path / "credentials"
    path.write_text('{"ark": "the-first-secret"}')
    monkeypatch.setenv("LEASEHOLD_GENERATION_CREDENTIALS_FILE", str(path))
    settings = Settings(_env_file=None)
    redaction.learn(settings)
    replace(path, '{"ark": "the-second-secret"}')
    assert settings.generation_credentials["ark"].get_secret_value() == "the-second-secret"
    assert "secret" not in redaction.redact("the-first-secret the-second-secret")


def test_sealing_uses_a_new_key_at_once_and_still_opens_what_the_old_one_sealed(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    old, new = Fernet.generate_key().decode(), Fernet.generate_key().decode()
    path.write_text(old)
    sealing = Sealing(Settings(_env_file=None, sealing_keys=FileSecret(path)))
    sealed, signature = sealing.seal(b"secret"), sealing.sign("a test", b"text")
    replace(path, f"{new},{old}")
    assert sealing.open(sealed) == b"secret"
    assert sealing.verifies("a test", b"text", signature)
    assert Fernet(new).decrypt(sealing.seal(b"later")) == b"later"
    replace(path, new)
    assert not sealing.verifies("a test", b"text", signature)
    with pytest.raises(Unsealable):
        sealing.open(sealed)


def test_a_log_line_never_holds_the_new_value(tmp_path: Path) -> None:
    path = tmp_path / "url"
    path.write_text("postgresql://leasehold:first-password@db/leasehold")
    settings = Settings(_env_file=None, database_url=FileSecret(path))
    redaction.learn(settings)
    try:
        replace(path, "postgresql://leasehold:second-password@db/leasehold")
        settings.database_url.get_secret_value()
        assert redaction.redact("it is second-password") == "it is [redacted]"
    finally:
        redaction.learn(Settings(_env_file=None))


def test_a_new_url_or_key_that_is_none_leaves_the_last_in_force(tmp_path: Path) -> None:
    url, key = tmp_path / "url", tmp_path / "key"
    url.write_text("amqp://a.example")
    first = Fernet.generate_key().decode()
    key.write_text(first)
    settings = Settings(_env_file=None, amqp_url=FileSecret(url), sealing_keys=FileSecret(key))
    nodes, sealing = Nodes(settings), Sealing(settings)
    sealed = sealing.seal(b"secret")
    replace(url, "no url at all")
    replace(key, first[:7])
    for _ in range(2):
        nodes.advance()
        assert "a.example" in nodes.current.url
        assert sealing.open(sealed) == b"secret"
        assert sealing.verifies("x", b"text", sealing.sign("x", b"text"))
    replace(url, "amqp://b.example")
    nodes.advance()
    assert "b.example" in nodes.current.url


def test_a_secret_that_was_replaced_is_still_redacted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "_secrets", ())
    path = tmp_path / "key"
    path.write_text("the-first-secret-key")
    secret = FileSecret(path)
    redaction.learn(Settings(_env_file=None, s3_secret_key=secret))
    replace(path, "the-second-secret-key")
    assert secret.get_secret_value() == "the-second-secret-key"
    assert "secret-key" not in redaction.redact("the-first-secret-key the-second-secret-key")
