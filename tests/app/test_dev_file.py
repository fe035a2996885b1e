"""The file of a running `leasehold dev`: what it holds comes back as it was, and only while its process lives."""

from __future__ import annotations

from pathlib import Path

import pytest

from leasehold.app.connection import settings_of_folder
from leasehold.app.dev_file import dev_file, dev_variables, living_dev_file


def test_every_value_comes_back_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    variables = {"A": "it's", "B": "'quoted'", "C": 'a "b" \\ $HOME', "D": "", "E": "a=b"}
    with dev_file(variables):
        assert dev_variables() == variables
    assert dev_variables() == {}


def test_a_program_reads_every_value_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another reader of such files would keep the quotes, and put in the variables of the environment."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    secret = "it's a \\ ${HOME}"
    variables = {
        "LEASEHOLD_S3_SECRET_KEY": secret,
        "LEASEHOLD_TENANT": "dev",
        "LEASEHOLD_S3_BUCKET": "dev",
    }
    with dev_file(variables):
        settings = settings_of_folder()
        assert settings.s3_secret_key.get_secret_value() == secret
        (tmp_path / ".env").write_text("LEASEHOLD_TENANT=of-the-folder\nLEASEHOLD_S3_BUCKET=of-the-folder\n")
        monkeypatch.setenv("LEASEHOLD_S3_BUCKET", "of-the-environment")
        settings = settings_of_folder()
        assert (settings.tenant, settings.s3_bucket) == ("of-the-folder", "of-the-environment")


def test_a_process_of_another_user_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_pid: int, _signal: int) -> None:
        raise PermissionError

    monkeypatch.chdir(tmp_path)
    with dev_file({"A": "b"}) as path:
        monkeypatch.setattr("os.kill", refuse)
        assert living_dev_file() == path
