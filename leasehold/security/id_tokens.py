"""Checks the ID token of an OpenID sign-in with joserfc: signature, issuer, audience, nonce and times.

The module `openid` calls `claims_of`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import structlog
from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import KeySet, import_key

from leasehold.domain.errors import LeaseholdError

log = structlog.get_logger(__name__)

#: The accepted algorithms. With each of them, the provider signs with its private key. `none` is not accepted, because
#: it has no signature. HMAC is not accepted, because its key would be the client's secret.
ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "Ed25519", "EdDSA")
#: The accepted types of keys: only public keys. Whoever reads a symmetric key can also sign with it.
_KEY_TYPES = frozenset({"RSA", "EC", "OKP"})
#: Seconds by which the provider's clock may differ from this machine's clock.
_LEEWAY_SECONDS = 60


class TokenRefused(LeaseholdError):
    """The ID token is not of this provider, not for this client, or not of this sign-in."""


def claims_of(token: object, keys: Sequence[object], *, issuer: str, client_id: str, nonce: str) -> dict[str, Any]:
    """The claims of the ID token. `keys`: the provider's keys, as its JWKS lists them. Raises TokenRefused."""
    registry = jwt.JWTClaimsRegistry(
        leeway=_LEEWAY_SECONDS,
        iss={"essential": True, "value": issuer},
        aud={"essential": True, "value": client_id},
        sub={"essential": True},
        exp={"essential": True},
        iat={"essential": True},
        nonce={"essential": True, "value": nonce},
    )
    try:
        decoded = jwt.decode(token if isinstance(token, str) else "", _key_set(keys), algorithms=ALGORITHMS)
        registry.validate(decoded.claims)
    except (JoseError, ValueError, TypeError) as error:  # TypeError means that a value of the header has another type
        log.warning("an ID token was refused", reason=type(error).__name__, claim=getattr(error, "claim", None))
        raise TokenRefused("its ID token is not valid") from None
    claims: dict[str, Any] = decoded.claims
    audience = claims["aud"]
    # A token with several audiences must name its client in `azp`; in any other token `azp` may be missing.
    has_several_audiences = isinstance(audience, list) and len(audience) > 1
    if claims.get("azp", None if has_several_audiences else client_id) != client_id:
        raise TokenRefused("its ID token is for another client")
    return claims


def _key_set(listed_keys: Sequence[object]) -> KeySet:
    """The listed keys that can check a signature. Keys for other uses, which a provider may also list, are left out."""
    keys = []
    for key in listed_keys:
        if not isinstance(key, dict) or str(key.get("kty")) not in _KEY_TYPES or key.get("use", "sig") != "sig":
            continue
        try:
            keys.append(import_key(key))
        except (JoseError, ValueError, KeyError, TypeError):
            log.warning("a key of the OpenID provider cannot be read", kid=str(key.get("kid"))[:60])
    return KeySet(keys)
