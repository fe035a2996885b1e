"""An OpenID provider's answers: what its configuration may leave out, and what signs nobody in."""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import orjson
import pytest
import time_machine
from joserfc import jwt
from joserfc.jwk import ECKey, OKPKey, RSAKey
from pydantic import SecretStr

from leasehold.domain.errors import BadGateway, Unauthenticated
from leasehold.security.egress import Answer, EgressFailed
from leasehold.security.id_tokens import TokenRefused, claims_of
from leasehold.security.openid import Flow, Identity, OpenId, _identity_of, memberships
from leasehold.settings import Membership, Settings


class Provider:
    """Answers each request with a token, in place of Egress."""

    def __init__(self) -> None:
        self.requests: list[tuple[Mapping[str, str], bytes]] = []

    async def request(self, _method: str, _url: str, *, headers: Any, content: bytes, **_limits: Any) -> Answer:
        self.requests.append((headers, content))
        return Answer(HTTPStatus.OK, {}, b'{"id_token": "t"}')


BASIC = f"Basic {base64.b64encode(b'console:secret').decode()}"


@pytest.mark.parametrize(
    ("methods", "authorization"),
    [
        ({}, BASIC),
        ({"token_endpoint_auth_methods_supported": None}, BASIC),
        ({"token_endpoint_auth_methods_supported": "client_secret_post"}, BASIC),  # no list: as if it were left out
        ({"token_endpoint_auth_methods_supported": ["client_secret_basic", "other"]}, BASIC),
        ({"token_endpoint_auth_methods_supported": ["client_secret_post"]}, None),
    ],
)
async def test_the_client_authenticates_as_the_provider_can(methods: Any, authorization: str | None) -> None:
    settings = Settings(
        _env_file=None, console_oidc_client_id="console", console_oidc_client_secret=SecretStr("secret")
    )
    provider: Any = Provider()
    client = OpenId(settings, "https://idp.example", provider)
    configuration = {"token_endpoint": "https://idp.example/token", **methods}
    tokens = await client._exchange(configuration, Flow.new(), "https://console.example/back", "code")
    ((headers, content),) = provider.requests
    assert tokens == {"id_token": "t"}
    assert headers.get("Authorization") == authorization
    assert (b"client_secret=secret" in content) == (authorization is None)


ISSUER, CLIENT_ID = "https://id.example", "console"
FLOW = Flow("state", "nonce", "verifier")
KEYS: dict[str, Any] = {
    "RSA": RSAKey.generate_key(2048, {"kid": "RSA"}),
    "ES256": ECKey.generate_key("P-256", {"kid": "ES256"}),
    "ES384": ECKey.generate_key("P-384", {"kid": "ES384"}),
    "ES512": ECKey.generate_key("P-521", {"kid": "ES512"}),
    "OKP": OKPKey.generate_key("Ed25519", {"kid": "OKP"}),
}
PUBLIC = [key.as_dict(private=False) for key in KEYS.values()]


def id_token(algorithm: str = "ES256", **changed: Any) -> str:
    now = int(time.time())
    claims = {"iss": ISSUER, "aud": CLIENT_ID, "sub": "vera", "nonce": "nonce", "iat": now, "exp": now + 60} | changed
    name = "RSA" if algorithm[:2] in ("RS", "PS") else algorithm if algorithm[:2] == "ES" else "OKP"
    header = {"alg": algorithm, "kid": name}
    present = {name: value for name, value in claims.items() if value is not None}
    return jwt.encode(header, present, KEYS[name], algorithms=[algorithm])


def claims(token: object, keys: list[Any] = PUBLIC) -> dict[str, Any]:
    return claims_of(token, keys, issuer=ISSUER, client_id=CLIENT_ID, nonce="nonce")


@pytest.mark.filterwarnings("ignore::joserfc.errors.SecurityWarning")
@pytest.mark.parametrize(
    "algorithm",
    ["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "Ed25519", "EdDSA"],
)
def test_a_provider_may_sign_with_each_algorithm_that_has_a_private_key(algorithm: str) -> None:
    assert claims(id_token(algorithm))["sub"] == "vera"


def test_a_token_for_several_must_name_its_client_and_one_for_the_client_alone_may() -> None:
    for audience, azp in (
        (CLIENT_ID, None),
        ([CLIENT_ID], None),
        (CLIENT_ID, CLIENT_ID),
        ([CLIENT_ID, "b"], CLIENT_ID),
    ):
        assert claims(id_token(aud=audience, azp=azp))["sub"] == "vera"
    for audience, azp in (([CLIENT_ID, "b"], None), ([CLIENT_ID, "b"], "b"), (CLIENT_ID, "b"), (["b"], CLIENT_ID)):
        with pytest.raises(TokenRefused):
            claims(id_token(aud=audience, azp=azp))


@pytest.mark.parametrize("claim", ["iss", "aud", "sub", "exp", "iat", "nonce"])
def test_a_token_that_leaves_out_what_binds_it_to_this_sign_in_is_refused(claim: str) -> None:
    left_out: dict[str, Any] = {claim: None}
    with pytest.raises(TokenRefused):
        claims(id_token(**left_out))


#: JSON as a token has it. Of this header the library expects a list.
ODD_HEADER = base64.urlsafe_b64encode(b'{"alg": "ES256", "crit": 1}').decode().rstrip("=")


@pytest.mark.parametrize("token", [None, 7, "", "a.b.c", ["a"], f"{ODD_HEADER}.e30.AA"])
def test_what_is_no_token_is_refused(token: object) -> None:
    with pytest.raises(TokenRefused):
        claims(token)


def test_keys_that_cannot_check_a_signature_are_left_out() -> None:
    useless: list[Any] = [None, "key", {"kty": "RSA", "kid": "broken"}, {"kty": "EC"}, {"kty": "oct", "k": "AAAA"}, {},
                          {"kty": ["RSA"]}, {"kty": {}}, {**PUBLIC[0], "use": ["sig"]}]  # fmt: skip
    assert claims(id_token(), [*useless, *PUBLIC])["sub"] == "vera"
    assert claims(id_token(), [{**key, "use": "sig"} for key in PUBLIC])["sub"] == "vera"
    for keys in (useless, [{**key, "use": "enc"} for key in PUBLIC]):
        with pytest.raises(TokenRefused):
            claims(id_token(), keys)


def test_a_token_without_the_name_of_its_key_is_checked_with_the_only_key_that_may_sign() -> None:
    """The provider also lists a key for encryption. The header may leave out the name if one key remains."""
    now = int(time.time())
    unnamed = {"iss": ISSUER, "aud": CLIENT_ID, "sub": "vera", "nonce": "nonce", "iat": now, "exp": now + 60}
    token = jwt.encode({"alg": "ES256"}, unnamed, KEYS["ES256"])
    rsa, es256 = PUBLIC[:2]
    assert claims(token, [{**rsa, "use": "enc"}, es256])["sub"] == "vera"
    with pytest.raises(TokenRefused):
        claims(token, [rsa, es256])


def test_the_clock_of_a_provider_may_be_a_minute_away() -> None:
    now = 1_800_000_000
    with time_machine.travel(now, tick=False):
        for issued, expires in ((now + 60, now + 3600), (now - 3600, now - 59)):
            assert claims(id_token(iat=issued, exp=expires))["sub"] == "vera"
        for issued, expires in ((now + 61, now + 3600), (now - 3600, now - 60)):
            with pytest.raises(TokenRefused):
                claims(id_token(iat=issued, exp=expires))


class Answers:
    """In the place of egress: a provider whose answers a test changes. `paths`: what it was asked for."""

    def __init__(self, issuer: str = ISSUER) -> None:
        self.issuer = issuer
        self.paths: list[str] = []
        self.error: Exception | None = None
        self.sent: dict[str, Mapping[str, str]] = {}
        self.configuration: dict[str, Any] = {
            "issuer": issuer, "authorization_endpoint": f"{issuer}/authorize", "token_endpoint": f"{issuer}/token",
            "jwks_uri": f"{issuer}/jwks", "userinfo_endpoint": f"{issuer}/userinfo",
        }  # fmt: skip
        self.bodies: dict[str, Any] = {
            "/.well-known/openid-configuration": self.configuration,
            "/token": {"id_token": id_token(iss=issuer, groups=["watchers"]), "access_token": "a"},
            "/jwks": {"keys": PUBLIC},
            "/userinfo": {"sub": "vera", "groups": ["admins"], "name": "Vera"},
        }
        self.statuses: dict[str, int] = {}

    async def request(self, _method: str, url: str, *, headers: Mapping[str, str], **_more: Any) -> Answer:
        path = url.removeprefix(self.issuer)
        self.paths.append(path)
        self.sent[path] = headers
        if self.error is not None:
            raise self.error
        return Answer(self.statuses.get(path, 200), {}, orjson.dumps(self.bodies[path]))


def client_of(provider: Answers) -> OpenId:
    settings = Settings(_env_file=None).model_copy(
        update={"console_oidc_client_id": CLIENT_ID, "console_oidc_claim": "groups"}
    )
    egress: Any = provider
    return OpenId(settings, provider.issuer, egress)


async def identified(provider: Answers, **callback: str) -> Identity:
    answer = {"state": "state", "code": "c"} | callback
    return await client_of(provider).identify(FLOW, "https://us.example/back", answer)


async def test_the_browser_must_come_back_from_its_own_sign_in_at_this_issuer() -> None:
    provider = Answers()
    assert (await identified(provider)).subject == "vera"
    assert (await identified(provider, iss=ISSUER)).subject == "vera"
    provider.paths.clear()
    refused = ({"state": "other"}, {"state": ""}, {"state": "\u00fc"}, {"iss": "https://evil.example"}, {"iss": ""},
               {"error": "access_denied"}, {"code": ""})  # fmt: skip
    for callback in refused:
        with pytest.raises(Unauthenticated) as error:
            await identified(provider, **callback)
        assert error.value.code == "sign_in_refused"
    assert "/token" not in provider.paths  # no code of another sign-in is redeemed
    provider.configuration["authorization_response_iss_parameter_supported"] = True
    assert (await identified(provider, iss=ISSUER)).subject == "vera"
    with pytest.raises(Unauthenticated):
        await identified(provider)


@pytest.mark.parametrize(
    ("path", "status", "body", "error"),
    [
        ("/token", 400, {"error": "invalid_grant"}, Unauthenticated),
        ("/token", 400, {"error": "invalid_client"}, BadGateway),
        ("/token", 401, {"error": "invalid_client"}, BadGateway),
        ("/token", 429, {}, BadGateway),
        ("/token", 503, ["away"], BadGateway),
        ("/token", 200, {}, Unauthenticated),
        ("/jwks", 500, ..., BadGateway),
        ("/jwks", 200, {"keys": []}, BadGateway),
        ("/jwks", 200, {"keys": {"a": PUBLIC[0]}}, BadGateway),
        ("/jwks", 200, {}, BadGateway),
        ("/.well-known/openid-configuration", 500, ..., BadGateway),
        (
            "/.well-known/openid-configuration",
            200,
            {"issuer": "https://evil.example", "token_endpoint": f"{ISSUER}/token", "jwks_uri": f"{ISSUER}/jwks"},
            BadGateway,
        ),
        ("/.well-known/openid-configuration", 200, {"issuer": ISSUER}, BadGateway),
    ],
)
async def test_an_answer_that_is_not_as_it_should_be_signs_nobody_in(
    path: str, status: int, body: Any, error: type[Exception]
) -> None:
    provider = Answers()
    provider.statuses[path] = status
    if body is not ...:
        provider.bodies[path] = body
    with pytest.raises(error):
        await identified(provider)


async def test_userinfo_is_asked_for_groups_that_the_token_lacks_and_must_be_of_the_same_person() -> None:
    provider = Answers()
    assert (await identified(provider)).groups == {"watchers"}
    assert "/userinfo" not in provider.paths
    provider.bodies["/token"]["id_token"] = id_token()
    found = await identified(provider)
    assert (found.groups, found.name) == (frozenset({"admins"}), "Vera")
    assert provider.sent["/userinfo"]["Authorization"] == "Bearer a"
    provider.statuses["/userinfo"] = 500
    with pytest.raises(BadGateway):
        await identified(provider)
    provider.statuses.clear()
    provider.bodies["/userinfo"]["sub"] = "somebody else"
    with pytest.raises(Unauthenticated):
        await identified(provider)
    provider.configuration["userinfo_endpoint"] = None
    assert (await identified(provider)).groups == frozenset()


@pytest.mark.parametrize(
    ("issuer", "endpoint", "usable"),
    [
        (ISSUER, f"{ISSUER}/token", True),
        (ISSUER, "http://id.example/token", False),
        (ISSUER, "ftp://id.example/token", False),
        (ISSUER, 7, False),
        (ISSUER, None, False),
        ("http://127.0.0.1:1", "http://127.0.0.1:1/token", True),
        ("http://127.0.0.1:1", "https://127.0.0.1:1/token", True),
        ("http://127.0.0.1:1", "ftp://127.0.0.1:1/token", False),
    ],
)
def test_no_secret_goes_to_an_endpoint_without_tls(issuer: str, endpoint: object, usable: bool) -> None:
    client = client_of(Answers(issuer))
    if usable:
        assert client._endpoint({"token_endpoint": endpoint}, "token_endpoint") == endpoint
    else:
        with pytest.raises(BadGateway):
            client._endpoint({"token_endpoint": endpoint}, "token_endpoint")


async def test_a_provider_that_does_not_answer_is_named_as_such_and_its_configuration_is_read_again_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr("leasehold.security.openid.monotonic", lambda: now)
    provider = Answers()
    provider.error = EgressFailed("no answer")
    client = client_of(provider)
    with pytest.raises(BadGateway) as refused:
        await client.sign_in_url(FLOW, "https://us.example/back")
    assert refused.value.code == "openid_unavailable"
    provider.error = None
    provider.paths.clear()
    for seconds, reads in ((0, 1), (299, 1), (300, 2)):
        now = 1000.0 + seconds
        url = await client.sign_in_url(FLOW, "https://us.example/back")
        assert url.startswith(f"{ISSUER}/authorize?")
        assert len(provider.paths) == reads


def test_a_person_has_what_their_groups_give_and_what_everybody_gets() -> None:
    settings = Settings(_env_file=None).model_copy(update={"console_oidc_roles": {
        "*": Membership(tenant="lobby", role="viewer"),
        "admins": Membership(tenant="acme", role="admin"),
        "sre": Membership(tenant="acme", role="operator", scopes=["fleet:operate"]),
    }})  # fmt: skip
    lobby = {"lobby": ["role:viewer"]}
    assert memberships(settings, frozenset()) == lobby
    assert memberships(settings, frozenset({"*", "others"})) == lobby
    assert memberships(settings, frozenset({"admins"})) == lobby | {"acme": ["role:admin"]}
    both = memberships(settings, frozenset({"admins", "sre"}))
    assert both == lobby | {"acme": ["fleet:operate", "role:admin", "role:operator"]}


@pytest.mark.parametrize(
    ("more", "login", "name"),
    [
        ({}, "vera", "vera"),
        ({"preferred_username": "v"}, "v", "v"),
        ({"preferred_username": "v", "email": "v@x.example"}, "v@x.example", "v@x.example"),
        ({"email": "v@x.example", "email_verified": True}, "v@x.example", "v@x.example"),
        ({"email": "v@x.example", "email_verified": "true", "name": " Vera\u202e "}, "v@x.example", "Vera"),
        ({"email": "v@x.example", "email_verified": False}, "vera", "vera"),
        ({"email": "v@x.example", "email_verified": "false"}, "vera", "vera"),
        ({"email": 7, "preferred_username": ["v"], "name": "n" * 300}, "vera", "n" * 200),
    ],
)
async def test_a_person_is_shown_by_what_the_provider_has_verified(more: dict[str, Any], login: str, name: str) -> None:
    provider = Answers()
    provider.bodies["/token"]["id_token"] = id_token(groups="watchers", **more)
    assert await identified(provider) == Identity(ISSUER, "vera", login, name, frozenset({"watchers"}))


@pytest.mark.parametrize(("subject", "usable"), [("v" * 255, True), ("v" * 256, False), ("\u202e", False), (7, False)])
def test_a_subject_is_a_text_that_can_be_stored(subject: object, usable: bool) -> None:
    if usable:
        assert _identity_of(ISSUER, {"sub": subject}, "groups").subject == subject
    else:
        with pytest.raises(Unauthenticated):
            _identity_of(ISSUER, {"sub": subject}, "groups")


def test_each_sign_in_has_secrets_of_its_own_that_nobody_guesses() -> None:
    flows = [Flow.new() for _ in range(5)]
    assert len({text for flow in flows for text in (flow.state, flow.nonce, flow.verifier)}) == 15
    assert {(len(flow.state), len(flow.nonce), len(flow.verifier)) for flow in flows} == {(43, 43, 64)}
