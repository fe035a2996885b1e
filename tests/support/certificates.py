"""Makes certificates for the tests: of an authority, of servers at 127.0.0.1 and localhost, and of clients."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from leasehold.embedded.tls import Tls


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its key, as PEM texts."""

    certificate: str
    key: str

    def write(self, directory: Path, name: str) -> tuple[Path, Path]:
        certificate, key = directory / f"{name}.crt", directory / f"{name}.key"
        certificate.write_text(self.certificate)
        key.write_text(self.key)
        key.chmod(0o600)
        return certificate, key


class Authority:
    """A certificate authority. `certificate`: its own certificate."""

    def __init__(self, name: str) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = self._builder(self._name, self._key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        self.certificate = self._signed(builder)

    def pair(self, name: str, *, addresses: tuple[str, ...] = (), names: tuple[str, ...] = ()) -> Pair:
        """Make a certificate for these addresses and names."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = self._builder(subject, key.public_key())
        alternatives: list[x509.GeneralName] = [x509.DNSName(host) for host in names]
        alternatives += [x509.IPAddress(ip_address(address)) for address in addresses]
        if alternatives:
            builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return Pair(self._signed(builder), private.decode())

    def server(self, *, clients: bool = False, addresses: tuple[str, ...] = ("127.0.0.1",)) -> Tls:
        """The certificate, key and authority for a private server on localhost and these addresses."""
        pair = self.pair("server", addresses=addresses, names=("localhost",))
        return Tls(pair.certificate, pair.key, self.certificate, clients)

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=2))
        )

    def _signed(self, builder: x509.CertificateBuilder) -> str:
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode()
