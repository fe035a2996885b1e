"""The runs door, as the command line uses it: requests, and their refusals as sentences."""

from __future__ import annotations

from typing import Any, Self

import httpx2

from leasehold.domain.errors import LeaseholdError

_NO_CONTENT = 204


class Refused(LeaseholdError):
    """The API said no, or did not answer."""


class ApiClient:
    """`with Door(url, key) as door`. Raises Refused."""

    def __init__(self, url: str, key: str) -> None:
        self._http = httpx2.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=40.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._http.close()

    def get(self, path: str, **params: Any) -> dict[str, Any]:
        wanted = {name: value for name, value in params.items() if value is not None}
        return self._ask("GET", path, params=wanted)

    def post(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        return self._ask("POST", path, json=body if body is not None else {})

    def patch(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._ask("PATCH", path, json=body)

    def delete(self, path: str) -> dict[str, Any]:
        return self._ask("DELETE", path)

    def _ask(self, method: str, path: str, **more: Any) -> dict[str, Any]:
        try:
            answer = self._http.request(method, path, **more)
        except httpx2.HTTPError as error:
            raise Refused(f"{self._http.base_url} does not answer: {error}") from error
        if answer.status_code == _NO_CONTENT:
            return {}
        try:
            said: dict[str, Any] = answer.json()
        except ValueError as error:
            raise Refused(f"{answer.status_code} from {self._http.base_url}: not what an API answers") from error
        if answer.is_error:
            raise Refused(f"{said.get('code', answer.status_code)}: {said.get('detail', 'no reason given')}")
        return said
