"""Settings that contradict each other are refused when a process starts, and not noticed by what it loses later."""

from __future__ import annotations

from base64 import b64encode

import pytest
from pydantic import SecretStr, ValidationError

from leasehold.settings import Settings, WorkerPool


@pytest.mark.parametrize(
    ("lease", "renew", "margin", "good"),
    [
        (30.0, 10.0, 5.0, True),
        (30.0, 24.9, 5.0, True),
        (30.0, 25.0, 5.0, False),
        (30.0, 40.0, 5.0, False),
        (30.0, 10.0, 30.0, False),
    ],
)
def test_a_worker_renews_its_leases_before_it_stops_trusting_them(
    lease: float, renew: float, margin: float, good: bool
) -> None:
    terms = {"lease_seconds": lease, "renew_seconds": renew, "trust_margin_seconds": margin}
    if good:
        assert Settings(_env_file=None, **terms).renew_seconds == renew  # type: ignore[arg-type]  # of any fields
    else:
        with pytest.raises(ValidationError, match="LEASEHOLD_RENEW_SECONDS must be less"):
            Settings(_env_file=None, **terms)  # type: ignore[arg-type]  # of any fields


def test_the_fewest_workers_of_a_pool_are_not_more_than_the_most() -> None:
    assert WorkerPool(least=7, most=7).least == 7
    with pytest.raises(ValidationError, match="least is 8, which is more than most, 7"):
        WorkerPool(least=8, most=7)


@pytest.mark.parametrize("name", ["egress_allow", "trusted_proxies", "console_oidc_networks"])
def test_networks_are_checked_when_a_process_starts(name: str) -> None:
    networks = " 10.0.0.0/8, fd00::/8 ,127.0.0.1,"
    assert getattr(Settings(_env_file=None, **{name: networks}), name) == networks  # type: ignore[arg-type]  # of any fields
    for wrong in ("10.0.0.0/33", "10.0.0.1/8", "10.0.0.0/8 fd00::/8", "intranet"):
        with pytest.raises(ValidationError) as refused:
            Settings(_env_file=None, **{name: f"127.0.0.1, {wrong}"})  # type: ignore[arg-type]  # of any fields
        assert refused.value.errors()[0]["loc"] == (name,)
        assert wrong in str(refused.value)


@pytest.mark.parametrize("text", ["no base64!", b64encode(b"short").decode(), b64encode(bytes(33)).decode()])
def test_a_signing_key_is_checked_when_a_process_starts(text: str) -> None:
    """Otherwise a conversion fails after all its work, when its package is signed."""
    with pytest.raises(ValidationError, match="32 bytes in base64") as refused:
        Settings(_env_file=None, conversion_signing_key=SecretStr(text))
    assert refused.value.errors()[0]["loc"] == ("conversion_signing_key",)
    assert text not in str(refused.value)
    for good in ("", b64encode(bytes(32)).decode()):
        kept = Settings(_env_file=None, conversion_signing_key=SecretStr(good)).conversion_signing_key
        assert kept.get_secret_value() == good


def test_a_standby_that_lags_shows_no_living_worker_as_silent() -> None:
    """A page that is read from it has heartbeats that are up to `database_replica_max_lag` old."""
    alone = Settings(_env_file=None, renew_seconds=5.0, database_replica_max_lag=60.0)
    assert (alone.silent_seconds, alone.silent_seconds_of_reads) == (15.0, 15.0)
    beside = alone.model_copy(update={"database_replica_url": SecretStr("postgresql://standby/x")})
    assert (beside.silent_seconds, beside.silent_seconds_of_reads) == (15.0, 75.0)


@pytest.mark.parametrize(
    "name", [name for name, field in Settings.model_fields.items() if field.annotation == (str | None)]
)
def test_an_empty_variable_is_an_unset_one(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Compose writes `${VARIABLE:-}` so. An empty `cdn_base_url` made links without a host, and an empty `work_dir`
    meant the current folder.
    """
    monkeypatch.setenv(f"LEASEHOLD_{name.upper()}", "")
    assert getattr(Settings(_env_file=None), name) is None
