from __future__ import annotations

import shutil
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import botocore.exceptions
import pytest

from leasehold.embedded.process import EmbeddedError, RunAs
from leasehold.embedded.s3 import S3, find_rclone
from tests.support.bucket import Bucket
from tests.support.processes import command_lines


@pytest.fixture
async def server(run_directory: Path) -> AsyncIterator[S3]:
    server = S3(run_directory / "s3-of-a-test")
    await server.start()
    yield server
    await server.stop()
    shutil.rmtree(server.directory)


def bucket_of(server: S3) -> Bucket:
    return Bucket(server.endpoint, server.access_key, server.secret_key, server.bucket)


async def test_an_object_survives_a_killed_server(server: S3) -> None:
    bucket = bucket_of(server)
    async with bucket.client() as client:
        await client.put_object(Bucket=bucket.bucket, Key="kept.txt", Body=b"bytes")
    await server.kill()
    await server.start()
    async with bucket.client() as client:
        answer = await client.get_object(Bucket=bucket.bucket, Key="kept.txt")
        assert await answer["Body"].read() == b"bytes"


async def test_a_wrong_secret_is_refused(server: S3) -> None:
    bucket = replace(bucket_of(server), secret_key="a guess")
    async with bucket.client() as client:
        with pytest.raises(botocore.exceptions.ClientError, match=r"SignatureDoesNotMatch|403"):
            await client.list_objects_v2(Bucket=bucket.bucket)


async def test_the_secret_is_in_no_command_line(server: S3) -> None:
    assert not [line for line in command_lines() if server.secret_key in line]


async def test_a_program_that_is_named_from_the_current_folder_is_the_same_from_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "rclone"
    program.symlink_to("/bin/true")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LEASEHOLD_RCLONE", "./rclone")
    assert await find_rclone(RunAs()) == program


async def test_a_server_whose_port_another_one_has_taken_does_not_start(run_directory: Path) -> None:
    """The other one accepts connections in its place: uploads would go there."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        server = S3(run_directory / "s3-of-a-taken-port", port=other.getsockname()[1])
        with pytest.raises(EmbeddedError, match="in use"):
            await server.start()
    assert not server.running
    await server.start()
    await server.stop()
    shutil.rmtree(server.directory)
