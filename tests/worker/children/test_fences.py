"""What code inside a child cannot do, even when a hostile input has taken it over."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from leasehold.domain.errors import Retryable
from leasehold.worker.sandbox import fences
from leasehold.worker.sandbox.children import Children
from tests.worker.children.conftest import Pool, pool

_DENIED = "PermissionError|Operation not permitted|Permission denied"


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """Somebody listens here, so a refusal is the fence's and not the network's."""

    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


@pytest.mark.parametrize("how", ["tcp", "http", "udp", "unix", "pair"])
async def test_a_step_cannot_reach_any_network(one: Pool, port: int, how: str) -> None:
    with pytest.raises(Retryable, match=_DENIED):
        await one.act("network", how=how, port=port)


async def test_a_step_cannot_pass_the_filter_by_io_uring(one: Pool) -> None:
    assert await one.value("io_uring") == {"answer": -1, "errno": "ENOSYS"}


@pytest.mark.parametrize("how", ["bomb", "spawn", "exec"])
async def test_a_step_cannot_start_processes_or_programs(one: Pool, how: str) -> None:
    with pytest.raises(Retryable, match=_DENIED):
        await one.act("fork", how=how)
    assert (await one.act("ok")).value is None


async def test_a_step_cannot_signal_others(one: Pool) -> None:
    with pytest.raises(Retryable, match=_DENIED):
        await one.act("signals", pid=os.getpid())


async def test_a_step_cannot_loosen_its_limits(one: Pool) -> None:
    with pytest.raises(Retryable, match="not allowed|" + _DENIED):
        await one.act("loosens")


async def test_a_step_cannot_outlive_the_worker(one: Pool) -> None:
    with pytest.raises(Retryable, match=_DENIED):
        await one.act("outlives_parent")


@pytest.mark.parametrize("how", ["symlink", "link"])
async def test_a_step_cannot_make_links(one: Pool, how: str) -> None:
    with pytest.raises(Retryable, match=_DENIED):
        await one.act("links", how=how, target="/etc/passwd")


async def test_a_step_cannot_read_the_workers_environment(one: Pool) -> None:
    with pytest.raises(Retryable, match=_DENIED):
        await one.act("reads_parent_environment")


async def test_secrets_of_the_workers_environment_are_not_in_the_childs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LEASEHOLD_DATABASE_URL", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "PGPASSWORD", "ODD"):
        monkeypatch.setenv(name, "canary-secret")
    made = await pool(tmp_path)
    environ = (await made.value("whoami"))["environ"]
    await made.children.close()
    assert "canary-secret" not in str(environ)
    assert not [name for name in environ if name.startswith(("LEASEHOLD_", "AWS_", "PG"))]


async def test_a_child_has_no_descriptors_but_its_log_and_the_protocol(tmp_path: Path) -> None:
    leaked, end = os.pipe()
    os.set_inheritable(leaked, True)
    made = await pool(tmp_path)
    descriptors = (await made.value("whoami"))["descriptors"]
    await made.children.close()
    os.close(leaked)
    os.close(end)
    kinds = [name.partition(":")[0] for name in descriptors]
    assert sorted(kinds) == ["/dev/null", "pipe", "pipe", "socket"]


async def test_where_the_kernel_has_landlock_a_step_sees_only_its_own_files(one: Pool, tmp_path: Path) -> None:
    """The rest of the machine stays unread and unwritten; without Landlock `isolation` does not claim it."""
    secret = tmp_path / "secret.txt"
    secret.write_text("canary-secret")
    if "landlock" in one.children.isolation:
        for path in (secret, Path("/etc/passwd"), Path(__file__).parents[3] / "pyproject.toml"):
            with pytest.raises(Retryable, match=_DENIED):
                await one.act("reads", path=str(path))
        with pytest.raises(Retryable, match=_DENIED):
            await one.act("writes", path=str(tmp_path / "planted"))
        assert not (tmp_path / "planted").exists()
    else:
        assert await one.value("reads", path=str(secret)) == {"text": "canary-secret"}


@pytest.mark.parametrize(
    ("fewer", "expected"),
    [
        ("without_landlock", {"seccomp"}),
        ("without_filter", {"netns+landlock", "netns", "limits only+landlock", "limits only"}),
        ("without_any", {"limits only"}),
    ],
)
async def test_a_kernel_with_fewer_fences_is_named_and_steps_still_run(
    tmp_path: Path, fewer: str, expected: set[str]
) -> None:
    made = await pool(tmp_path, source=f"tests.worker.children.lesser_kernels:{fewer}")
    assert made.children.isolation in expected
    assert await made.value("ok", n=1) == {"n": 1}
    with pytest.raises(Retryable, match=_DENIED):
        await made.act("reads_parent_environment")
    await made.children.close()


async def test_a_fence_that_one_zygote_lacks_is_not_claimed_for_the_worker(tmp_path: Path) -> None:
    source = "tests.worker.children.lesser_kernels:with_network_for_one"
    children = Children(1, pipelines=["scripted", "beside"], work_dir=tmp_path, source=source)
    await children.start()
    assert children.isolation == "limits only"
    await children.close()


@pytest.mark.parametrize(
    ("isolations", "held_by_all"),
    [
        (["seccomp+landlock", "seccomp+landlock"], "seccomp+landlock"),
        (["seccomp+landlock", "seccomp"], "seccomp"),
        (["netns+landlock", "limits only+landlock"], "limits only+landlock"),
        (["netns", "limits only+landlock"], "limits only"),
        (["limits only", "netns"], "limits only"),
    ],
)
def test_the_fences_of_a_worker_are_those_that_all_its_zygotes_have(isolations: list[str], held_by_all: str) -> None:
    assert fences.common(isolations) == held_by_all
    assert fences.common(isolations[::-1]) == held_by_all


async def test_without_a_filter_a_network_namespace_keeps_steps_off_the_network(tmp_path: Path, port: int) -> None:
    made = await pool(tmp_path, source="tests.worker.children.lesser_kernels:without_filter")
    if made.children.isolation.startswith("netns"):
        with pytest.raises(Retryable):
            await made.act("network", how="tcp", port=port)
    else:
        assert made.children.isolation.startswith("limits only")
    await made.children.close()


def test_outside_pythons_own_folder_packages_may_be_read_with_their_libraries_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `pip install --user` and `--target` install them. Without its `.libs`, numpy cannot be imported."""
    for name in ("shop", "numpy.libs", "numpy-2.0.dist-info", "named", "keys", "google/protobuf", "a-1.dist-info"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("shop/__init__.py", "module.py", ".env", "keys/key.pem", "google/protobuf/__init__.py"):
        (tmp_path / name).touch()
    (tmp_path / "numpy-2.0.dist-info" / "RECORD").write_text(
        "../../bin/protoc,sha256=x,1\n/keys/a,,\ngoogle/protobuf/__init__.py,sha256=x,0\n.env,,\n"
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    found = {path.name for path in fences.importable({"named"}) if path.is_relative_to(tmp_path.resolve())}
    namespace = "google"  # it has no `__init__.py`
    assert found == {"shop", "module.py", "numpy.libs", "numpy-2.0.dist-info", "a-1.dist-info", "named", namespace}


def test_a_folder_that_the_user_may_not_search_hides_no_package_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("shop", "locked"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    stat, locked = os.stat, f"{tmp_path.resolve()}/locked/"

    def refusing(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
        if str(path).startswith(locked):
            raise PermissionError(13, "Permission denied")
        return stat(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", refusing)  # root may search every folder
        found = fences.importable(set())
    assert tmp_path.resolve() / "shop" in found
    assert tmp_path.resolve() / "locked" not in found
