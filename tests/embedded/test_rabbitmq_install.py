"""Which of the programs named rabbitmq-server is started."""

from __future__ import annotations

from pathlib import Path

from leasehold.embedded.rabbitmq_install import RabbitServer


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


def test_a_directory_without_the_program_has_no_server(tmp_path: Path) -> None:
    assert RabbitServer.at(tmp_path) is None
