"""Certificates for tests, made by the openssl program."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)


@dataclass(frozen=True)
class Issued:
    """A certificate and its key, PEM."""

    cert: Path
    key: Path


class Authority:
    """A certificate authority. Its files lie in `directory`, which is made."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self._directory = directory
        self.cert, self._key = directory / "ca.pem", directory / "ca.key"
        self._new_key("ca")
        _openssl(
            *("req", "-x509", "-new", "-key", self._key, "-subj", f"/CN={directory.name}", "-days", "2"),
            *("-addext", "keyUsage=critical,keyCertSign", "-out", self.cert),
        )

    def issue(self, name: str) -> Issued:
        """For a server at 127.0.0.1, and for a client."""
        issued = Issued(self._directory / f"{name}.pem", self._new_key(name))
        request, extensions = self._directory / f"{name}.csr", self._directory / "extensions"
        extensions.write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
        _openssl("req", "-new", "-key", issued.key, "-subj", f"/CN={name}", "-out", request)
        _openssl(
            *("x509", "-req", "-in", request, "-CA", self.cert, "-CAkey", self._key, "-days", "1"),
            *("-extfile", extensions, "-out", issued.cert),
        )
        return issued

    def _new_key(self, name: str) -> Path:
        key = self._directory / f"{name}.key"
        _openssl("genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", key)
        return key
