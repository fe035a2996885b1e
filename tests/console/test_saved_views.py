"""Filters of jobs that people of a tenant gave a name."""

from __future__ import annotations

import re
from uuid import uuid4

import httpx2
import pytest

from leasehold.db import saved_views
from leasehold.db.database import Connection
from tests.api.media_api import problem
from tests.console.conftest import ROLES, MakePerson
from tests.jobs.conftest import MakeClient, Maker


async def test_a_filter_is_saved_by_a_name_for_everybody_of_the_tenant(
    person: MakePerson, maker: Maker, rows: Connection
) -> None:
    await maker.make("media")
    operator, viewer = await person(ROLES["operator"]), await person(ROLES["viewer"])
    stranger = await person(ROLES["operator"], tenant="other")
    q = 'kind:media tag.a:"x & y"'
    assert "Save the view" not in await operator.see("/jobs")
    assert "Save the view" not in await operator.see("/jobs?q=status:failed")  # the console's own
    assert "Save the view" in await operator.see("/jobs?q=kind:media")
    assert "Save the view" not in await viewer.see("/jobs?q=kind:media")
    page = await operator.do("/jobs/views/save", name=" \u05e9\u05dc\u05d5\u05dd <b> ", filter=q)
    assert "The view \u05e9\u05dc\u05d5\u05dd &lt;b&gt; is saved." in page
    assert "Forget this view" in page
    seen = await viewer.see("/jobs")
    link = re.search(r'<a href="/console(/jobs\?q=[^"]+)" class="own"[^>]*><bdi>\u05e9', seen)
    assert link is not None
    assert 'aria-current="true"' in (await viewer.see(link[1].replace("&amp;", "&"))).split('class="own"')[1][:200]
    assert "Forget this view" not in await viewer.see(link[1].replace("&amp;", "&"))
    assert "\u05e9" not in await stranger.see("/jobs")
    view_id = await rows.fetchval("SELECT id FROM saved_view")
    assert (await stranger.send(f"/jobs/views/{view_id}/delete")).status_code == 404
    assert "The view is deleted." in await operator.do(f"/jobs/views/{view_id}/delete", filter=q)
    assert "\u05e9" not in await operator.see("/jobs")
    acts = await rows.fetch(
        "SELECT action, details::jsonb ->> 'filter' AS filter FROM audit WHERE target_kind = 'view'"
    )
    assert [(act["action"], act["filter"]) for act in acts] == [("view.saved", q), ("view.deleted", None)]


async def test_a_view_that_cannot_be_is_refused(person: MakePerson) -> None:
    operator = await person(ROLES["operator"])
    for wrong in ({"name": "x", "filter": "no:term"}, {"name": "", "filter": "kind:run"}, {"name": "x", "filter": ""}):
        assert "flash bad" in await operator.do("/jobs/views/save", back="/jobs", **wrong), wrong


async def test_views_over_http(
    client: httpx2.AsyncClient, client_with: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = (await client.put("/v1/views", json={"name": "b", "filter": "status:failed"})).json()
    again = (await client.put("/v1/views", json={"name": "b", "filter": "status:running"})).json()
    assert (again["id"], again["filter"]) == (made["id"], "status:running")
    await client.put("/v1/views", json={"name": "A", "filter": "kind:run"})
    listed = (await client.get("/v1/views")).json()["views"]
    assert [(one["name"], one["filter"]) for one in listed] == [("A", "kind:run"), ("b", "status:running")]
    wrong = await client.put("/v1/views", json={"name": "c", "filter": "kind:media kind:run"})
    (place,) = problem(wrong, 422, "invalid_filter")["errors"]
    assert (place["pointer"], place["position"]) == ("#/filter", 12)
    stranger = await client_with("jobs:read", "jobs:operate", tenant="other")
    assert (await stranger.get("/v1/views")).json() == {"views": []}
    problem(await stranger.delete(f"/v1/views/{made['id']}"), 404, "view_not_found")
    monkeypatch.setattr(saved_views, "MAX_VIEWS", 2)
    problem(await client.put("/v1/views", json={"name": "c", "filter": "kind:run"}), 409, "too_many_views")
    assert (await client.put("/v1/views", json={"name": "b", "filter": "kind:run"})).status_code == 200
    assert (await client.delete(f"/v1/views/{made['id']}")).status_code == 204
    assert (await client.put("/v1/views", json={"name": "c", "filter": "kind:run"})).status_code == 200
    problem(await client.delete(f"/v1/views/{uuid4()}"), 404, "view_not_found")
