"""Writes the TLS files of a private server that accepts only encrypted connections."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from leasehold.embedded.process import RunAs


@dataclass(frozen=True, slots=True)
class Tls:
    """The server's certificate and key, and the certificate of the authority that signed it. All three are PEM texts.

    `requires_client_certificate`: the server refuses a client that has no certificate from this authority.
    """

    certificate: str
    key: str
    authority: str
    requires_client_certificate: bool = False

    def write(self, directory: Path, run_as: RunAs) -> tuple[Path, Path, Path]:
        """Write certificate, key and authority as files that only the server's user can read. Returns their paths."""
        certificate, key, authority = (directory / name for name in ("server.crt", "server.key", "authority.crt"))
        for path, text in ((certificate, self.certificate), (key, self.key), (authority, self.authority)):
            run_as.write_file(path, text)
        return certificate, key, authority
