"""Which of the programs named rabbitmq-server is started."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from leasehold.embedded import rabbitmq_install
from leasehold.embedded.process import EmbeddedError
from leasehold.embedded.rabbitmq_install import RabbitServer, find_rabbitmq


def _program(root: Path, place: str) -> Path:
    program = root / place / "rabbitmq-server"
    program.parent.mkdir(parents=True)
    program.touch()
    return program


def test_the_wrapper_of_debians_package_is_not_started(tmp_path: Path) -> None:
    """The wrapper refuses all users but two. Since Debian merged its directories, /sbin leads to it."""
    _program(tmp_path, "usr/sbin")
    (tmp_path / "sbin").symlink_to("usr/sbin")
    program = _program(tmp_path, "usr/lib/rabbitmq/bin")
    server = RabbitServer.at(tmp_path)
    assert server is not None
    assert server.program == program


def test_the_program_of_an_unpacked_release_is_in_its_sbin(tmp_path: Path) -> None:
    program = _program(tmp_path, "sbin")
    server = RabbitServer.at(tmp_path)
    assert server is not None
    assert server.program == program


def test_a_server_that_is_named_from_the_current_folder_is_the_same_from_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = _program(tmp_path / "own", "sbin")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LEASEHOLD_RABBIT", "own")
    server = find_rabbitmq()
    assert server is not None
    assert server.program == program


def test_who_can_have_no_cache_has_no_unpacked_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container the user often has no home. `leasehold dev` must start there, without RabbitMQ."""
    (tmp_path / "file").touch()
    monkeypatch.delenv("LEASEHOLD_RABBIT", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))  # without Erlang, the server of the system does not count
    monkeypatch.setenv("LEASEHOLD_CACHE", str(tmp_path / "file" / "cache"))
    assert find_rabbitmq() is None


def test_a_directory_without_the_program_has_no_server(tmp_path: Path) -> None:
    assert RabbitServer.at(tmp_path) is None


async def test_packages_without_a_server_leave_nothing_so_that_the_next_try_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are Debian's; what they hold is not ours to say."""
    holds_server = False

    async def unpack(_packages: object, root: Path) -> None:
        (root / "usr/lib/erlang").mkdir(parents=True, exist_ok=True)
        if holds_server:
            _program(root, "usr/lib/rabbitmq/bin")

    async def no_libraries(_root: Path) -> set[str]:
        return set()

    monkeypatch.setattr(rabbitmq_install, "unpack_packages", unpack)
    monkeypatch.setattr(rabbitmq_install, "_find_missing_libraries", no_libraries)
    monkeypatch.setattr(rabbitmq_install, "find_rabbitmq", lambda: None)
    monkeypatch.setattr(rabbitmq_install, "cache_directory", lambda: tmp_path)
    for _ in range(2):
        with pytest.raises(EmbeddedError, match="have no rabbitmq-server"):
            await rabbitmq_install.install_rabbitmq()
    holds_server = True
    server = await rabbitmq_install.install_rabbitmq()
    assert server.program.is_relative_to(tmp_path)
    assert server.program.exists()


async def test_a_library_under_neither_name_is_an_error_that_names_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first name may be the distribution's, and its download may have failed."""

    async def fails(packages: list[str], _root: Path) -> None:
        raise EmbeddedError(f"{packages[0]} could not be downloaded")

    monkeypatch.setattr(rabbitmq_install, "unpack_packages", fails)
    with pytest.raises(EmbeddedError, match=re.escape("libssl3 could not be downloaded; libssl3t64 could not be down")):
        await rabbitmq_install._unpack_first_available(("libssl3", "libssl3t64"), tmp_path)
