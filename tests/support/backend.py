"""Chooses where the tests' servers come from: the environment, containers, or private processes."""

from __future__ import annotations

import gc
import os
import warnings
from enum import StrEnum
from functools import cache

import docker  # type: ignore[import-untyped]  # the package has no types
import docker.errors  # type: ignore[import-untyped]  # the same


class Backend(StrEnum):
    ENVIRONMENT = "env"
    DOCKER = "docker"
    PRIVATE = "private"


def backend_of(variable: str) -> Backend:
    """Choose the source of the server whose URL is in `variable`, by LEASEHOLD_TEST_BACKEND=auto|env|docker|private.

    Raises:
        RuntimeError: this machine cannot follow the choice. No test is skipped for that.
    """
    choice = os.environ.get("LEASEHOLD_TEST_BACKEND", "auto")
    if choice == "auto":
        if os.environ.get(variable):
            return Backend.ENVIRONMENT
        return Backend.DOCKER if docker_answers() else Backend.PRIVATE
    backend = Backend(choice)
    if backend is Backend.ENVIRONMENT and not os.environ.get(variable):
        raise RuntimeError(f"LEASEHOLD_TEST_BACKEND=env needs {variable}")
    if backend is Backend.DOCKER and not docker_answers():
        raise RuntimeError("LEASEHOLD_TEST_BACKEND=docker, but no Docker daemon answers")
    return backend


@cache
def docker_answers() -> bool:
    """Whether a Docker daemon answers. An installed `docker` command does not show that."""
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", ResourceWarning
        )  # the client does not close its socket if the daemon refuses it
        answered = _ping()
        gc.collect()  # so that the warning of that socket comes here, and not in a test
    return answered


def _ping() -> bool:
    try:
        client = docker.from_env(timeout=5)
    except docker.errors.DockerException:
        return False
    try:
        return bool(client.ping())
    except docker.errors.DockerException:
        return False
    finally:
        client.close()
