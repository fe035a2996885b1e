"""Which PostgreSQL is taken: one that can make and run a cluster, and of several the newest."""

from __future__ import annotations

from pathlib import Path

import pytest

from leasehold.embedded import postgres_programs
from leasehold.embedded.postgres_programs import find_postgres, find_postgres_with_tls
from leasehold.embedded.process import EmbeddedError, RunAs

SERVER = ("initdb", "postgres")
TLS = "echo '--with-openssl'"


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with no PostgreSQL but the packages that the test makes."""
    root = tmp_path / "postgresql"
    monkeypatch.setattr(postgres_programs, "SYSTEM", root)
    monkeypatch.setattr(postgres_programs, "_pgserver_package", lambda: None)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("LEASEHOLD_PG_BIN", raising=False)
    return root


def install(directory: Path, *programs: str, pg_config: str | None = None) -> Path:
    directory.mkdir(parents=True)
    for program in programs:
        (directory / program).touch(mode=0o755)
    if pg_config is not None:
        (directory / "pg_config").write_text(f"#!/bin/sh\n{pg_config}\n")
        (directory / "pg_config").chmod(0o755)
    return directory


async def test_a_configured_directory_comes_first(
    system: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(system / "17" / "bin", *SERVER)
    configured = install(tmp_path / "own", *SERVER)
    monkeypatch.chdir(tmp_path)
    for name in (str(configured), "own"):  # the server has another current folder
        monkeypatch.setenv("LEASEHOLD_PG_BIN", name)
        assert await find_postgres(RunAs()) == configured


@pytest.mark.parametrize("programs", [(), ("initdb",), ("postgres",)])
async def test_a_configured_directory_without_a_server_is_refused(
    system: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, programs: tuple[str, ...]
) -> None:
    install(system / "17" / "bin", *SERVER, pg_config=TLS)
    monkeypatch.setenv("LEASEHOLD_PG_BIN", str(install(tmp_path / "own", *programs, pg_config=TLS)))
    for finding in (find_postgres(RunAs()), find_postgres_with_tls()):
        with pytest.raises(EmbeddedError, match=r"LEASEHOLD_PG_BIN names .*own, which has no initdb or no postgres"):
            await finding


async def test_of_the_systems_servers_the_newest_is_taken_and_no_package_of_clients(system: Path) -> None:
    install(system / "18" / "bin", "psql", pg_config=TLS)
    install(system / "common" / "bin", *SERVER, pg_config=TLS)
    for version in ("9.6", "17", "10"):
        install(system / version / "bin", *SERVER, pg_config=TLS)
    assert await find_postgres(RunAs()) == system / "17" / "bin"
    assert await find_postgres_with_tls() == system / "17" / "bin"


async def test_a_server_whose_tls_nobody_can_ask_for_is_passed_over(system: Path) -> None:
    install(system / "17" / "bin", *SERVER)
    install(system / "16" / "bin", *SERVER, pg_config="exit 1")
    install(system / "15" / "bin", *SERVER, pg_config="echo '--without-ssl'")
    with pytest.raises(EmbeddedError, match="no PostgreSQL with TLS"):
        await find_postgres_with_tls()
    built_with_tls = install(system / "14" / "bin", *SERVER, pg_config=TLS)
    assert await find_postgres_with_tls() == built_with_tls


async def test_pg_config_names_the_last_choice(system: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = install(tmp_path / "built", *SERVER)
    install(tmp_path / "bin", pg_config=f"echo {built}")
    assert await find_postgres(RunAs()) == built
    (built / "initdb").unlink()
    with pytest.raises(EmbeddedError, match="no PostgreSQL was found"):
        await find_postgres(RunAs())
    for program in SERVER:  # an answer that names no directory is not the current one
        (tmp_path / program).touch(mode=0o755)
    (tmp_path / "bin" / "pg_config").write_text("#!/bin/sh\n:\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(EmbeddedError, match="no PostgreSQL was found"):
        await find_postgres(RunAs())
