"""Corrects the `Allow` header of a 405 (method not allowed). Several routes may have the same address, and the
framework names only the methods of the first route. The module also corrects a 404 that should be a 405.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from http import HTTPStatus
from re import Pattern

from fastapi.routing import APIRoute

from leasehold.api.http.problems import Problem, problem_of_status


class Methods:
    """The methods of each address, over all routes of an app. An address is a literal path or, if it has parameters, a
    pattern.
    """

    def __init__(self, routes: Iterable[APIRoute]) -> None:
        self._by_literal_path: defaultdict[str, set[str]] = defaultdict(set)
        by_pattern: defaultdict[Pattern[str], set[str]] = defaultdict(set)
        for route in routes:
            if "{" in route.path:
                by_pattern[route.path_regex] |= route.methods or set()
            else:
                self._by_literal_path[route.path] |= route.methods or set()
        self._by_pattern = list(by_pattern.items())

    def of(self, path: str) -> set[str]:
        """The methods of the address. The set is empty if no route has this address. If routes have this literal path,
        a pattern that matches it does not count. For example, `/v1/runs/batch` is not the run with the id `batch`.
        """
        if path in self._by_literal_path:
            return self._by_literal_path[path]
        allowed_methods: set[str] = set()
        for pattern, methods in self._by_pattern:
            if pattern.match(path):
                allowed_methods |= methods
        return allowed_methods

    def corrected(self, problem: Problem, method: str, path: str) -> Problem:
        """If the problem is a 405, it gets the right `Allow` header. A 404 becomes a 405 if routes have this literal
        path, but none of them has this method. Such a 404 came from another route, whose pattern matches the path. Any
        other problem is returned unchanged.
        """
        has_other_methods = path in self._by_literal_path and method not in self._by_literal_path[path]
        if problem.status is HTTPStatus.NOT_FOUND and problem.code == "not_found" and has_other_methods:
            problem = problem_of_status(HTTPStatus.METHOD_NOT_ALLOWED)
        if problem.status is not HTTPStatus.METHOD_NOT_ALLOWED:
            return problem
        return problem_of_status(HTTPStatus.METHOD_NOT_ALLOWED, {"Allow": ", ".join(sorted(self.of(path)))})
