"""Which methods an address knows: of all its routes, where the framework's own 405 names those of the first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from http import HTTPStatus
from re import Pattern

from fastapi.routing import APIRoute

from leasehold.api.http.problems import Problem, problem_of_status


class Methods:
    def __init__(self, routes: Iterable[APIRoute]) -> None:
        self._literal: defaultdict[str, set[str]] = defaultdict(set)
        by_pattern: defaultdict[Pattern[str], set[str]] = defaultdict(set)
        for route in routes:
            if "{" in route.path:
                by_pattern[route.path_regex] |= route.methods or set()
            else:
                self._literal[route.path] |= route.methods or set()
        self._by_pattern = list(by_pattern.items())

    def of(self, path: str) -> set[str]:
        """Empty where there is nothing. `/v1/runs/batch` is an address of its own, and no run called batch."""
        if path in self._literal:
            return self._literal[path]
        found: set[str] = set()
        for pattern, methods in self._by_pattern:
            if pattern.match(path):
                found |= methods
        return found

    def corrected(self, problem: Problem, path: str) -> Problem:
        """With the right `Allow`; and 405 for 404 where the address is there and the method is not."""
        if problem.status is HTTPStatus.NOT_FOUND and problem.code == "not_found" and path in self._literal:
            problem = problem_of_status(HTTPStatus.METHOD_NOT_ALLOWED)
        if problem.status is not HTTPStatus.METHOD_NOT_ALLOWED:
            return problem
        return problem_of_status(HTTPStatus.METHOD_NOT_ALLOWED, {"Allow": ", ".join(sorted(self.of(path)))})
