"""Who packaged a model can be proved, and nothing of a package can be changed unnoticed."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from leasehold.cli.signing_key import make_signing_key
from leasehold.domain.errors import DeclarationError
from leasehold.pipelines.conversion import nef
from leasehold.pipelines.conversion.pipeline import conversion
from leasehold.pipelines.conversion.signing import key_of, sign_package
from leasehold.settings import Settings

OURS, OTHERS = make_signing_key(), make_signing_key()


def public(pair: dict[str, str]) -> bytes:
    return base64.b64decode(pair["public"])


@pytest.fixture
def package(tmp_path: Path) -> Path:
    part = tmp_path / "part"
    part.write_bytes(b"bytes of a graph")
    nef.write(tmp_path / "out.nef", {"toolchain": "open"}, {"model.onnx": part})
    return tmp_path / "out.nef"


def signing(pair: dict[str, str] | None) -> Settings:
    text = "" if pair is None else pair["private"]
    return Settings(_env_file=None, conversion_signing_key=SecretStr(text))


def test_a_package_says_who_signed_it(package: Path) -> None:
    sign_package(signing(OURS), {"output/out.nef": package})
    read = nef.read(package, trusted=[public(OTHERS), public(OURS)])
    assert read.signed_by == public(OURS)
    assert read.part("model.onnx") == b"bytes of a graph"
    with pytest.raises(nef.BadContainer, match="trusted"):
        nef.read(package, trusted=[public(OTHERS)])


def test_the_same_key_gives_the_same_bytes(package: Path) -> None:
    before = package.read_bytes()
    nef.sign(package, key_of(OURS["private"]))
    once = package.read_bytes()
    nef.sign(package, key_of(OURS["private"]))
    assert package.read_bytes() == once != before


def test_without_a_key_a_package_is_unsigned_and_nobody_who_asks_for_one_takes_it(package: Path) -> None:
    sign_package(signing(None), {"output/out.nef": package})
    assert nef.read(package).signed_by is None
    with pytest.raises(nef.BadContainer, match="trusted"):
        nef.read(package, trusted=[public(OURS)])


@pytest.mark.parametrize("at", [20, 50, 81, 150])
def test_a_byte_that_was_changed_is_noticed(package: Path, at: int) -> None:
    """Of the digest, the key, the signature, and the manifest."""
    nef.sign(package, key_of(OURS["private"]))
    changed = bytearray(package.read_bytes())
    changed[at] ^= 1
    package.write_bytes(changed)
    with pytest.raises(nef.BadContainer):
        nef.read(package)


@pytest.mark.parametrize(
    "manifest",
    [
        b"no json", b"\xff", b"[]", b"{}", b'{"parts":{}}', b'{"parts":[7]}', b'{"parts":[{"name":"a"}]}',
        b'{"parts":[{"name":"a","sha256":"","size":"0"}]}', b'{"parts":[{"name":"a","sha256":"","size":0.0}]}',
        b'{"parts":[{"name":1,"sha256":"","size":0}]}', b'{"parts":[{"name":"a","sha256":1,"size":0}]}',
        b'{"parts":[{"name":"a","sha256":"","size":5},{"name":"b","sha256":"","size":-5}]}',
        b'{"parts":[{"name":"a","sha256":"","size":true},{"name":"b","sha256":"","size":-1}]}',
    ],
)  # fmt: skip
@pytest.mark.parametrize("trusted", [None, [public(OURS)]], ids=["anybody", "ours"])
def test_a_package_whose_manifest_is_none_is_a_bad_container(
    tmp_path: Path, manifest: bytes, trusted: list[bytes] | None
) -> None:
    """Anybody can write a package: its digest proves nothing about its form."""
    package = tmp_path / "foreign.nef"
    digest = hashlib.sha256(manifest).digest()
    package.write_bytes(nef.MAGIC + len(manifest).to_bytes(8, "big") + digest + bytes(96) + manifest)
    with pytest.raises(nef.BadContainer):
        nef.read(package, trusted)


def test_a_binary_of_the_vendor_is_left_as_it_is(tmp_path: Path) -> None:
    vendor = tmp_path / "vendor.nef"
    vendor.write_bytes(b"not ours")
    sign_package(signing(OURS), {"output/out.nef": vendor})
    assert vendor.read_bytes() == b"not ours"


@pytest.mark.parametrize("text", ["no base64!", base64.b64encode(b"short").decode()])
def test_a_key_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(DeclarationError) as said:
        key_of(text)
    assert text not in str(said.value)


def test_only_the_files_of_an_isolated_step_can_be_finished() -> None:
    assert set(conversion.finishers) == {"nef"}

    def nothing(_settings: Any, _files: Any) -> None:
        raise AssertionError

    with pytest.raises(DeclarationError):
        conversion.finishes("nobody", nothing)
