"""Who gets in: {plaintext, TLS, mutual TLS} x certificates x tokens; and certificates that change under a server."""

from __future__ import annotations

import asyncio
import json
import shutil
import ssl
from dataclasses import dataclass
from pathlib import Path

import pytest

import opticnerve
from certificates import Authority, Issued
from frontend_harness import serving, until
from opticnerve import AsyncClient, Tls
from opticnerve import cli as client_cli
from opticnerve.errors import ServerError
from opticnerve_server import cli
from opticnerve_server.config import Config
from opticnerve_server.credentials import CredentialFiles
from opticnerve_server.models.checkpoint import write_checkpoint
from opticnerve_server.ports import split_address
from running_server import running

TOKENS = {"no": "", "right": "red-token-0123456789", "wrong": "wrong-token-0123456789"}


@dataclass(frozen=True)
class Files:
    ours: Authority
    server: Issued
    client: Issued
    stranger: Issued  # whose authority nobody knows
    tokens: Path

    @property
    def tls(self) -> dict[str, object]:
        return {"tls_cert": str(self.server.cert), "tls_key": str(self.server.key)}

    def callers(self) -> dict[str, Tls | None]:
        ca = self.ours.cert
        return {
            "plaintext": None,
            "no certificate": Tls(ca),
            "right certificate": Tls(ca, self.client.cert, self.client.key),
            "wrong certificate": Tls(ca, self.stranger.cert, self.stranger.key),
            "wrong authority": Tls(self.stranger.cert),
        }


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    directory = tmp_path_factory.mktemp("certificates")
    ours, theirs = Authority(directory / "ours"), Authority(directory / "theirs")
    (directory / "tokens").write_text(f"red:{TOKENS['right']}\n")
    issued = ours.issue("server"), ours.issue("client"), theirs.issue("stranger")
    return Files(ours, *issued, directory / "tokens")


ADMITTED = {
    "plaintext": {"plaintext"},
    "TLS": {"no certificate", "right certificate", "wrong certificate"},  # nobody asks for it
    "mutual TLS": {"right certificate"},
}


@pytest.mark.parametrize("kind", ADMITTED)
async def test_who_gets_in(kind: str, files: Files) -> None:
    callers = files.callers()
    settings = {"plaintext": {}, "TLS": files.tls, "mutual TLS": files.tls | {"tls_client_ca": str(files.ours.cert)}}
    expected = {
        (caller, token): ("UNAVAILABLE" if caller not in ADMITTED[kind] else "OK" if token == "right" else "TOKEN")
        for caller in callers
        for token in TOKENS
    }
    harness_tls = None if kind == "plaintext" else callers["right certificate"]
    async with serving(tls=harness_tls, auth_token_file=str(files.tokens), **settings[kind]) as server:
        found = {
            (caller, token): await outcome(server.address, callers[caller], TOKENS[token]) for caller, token in expected
        }
    assert found == expected


async def outcome(address: str, tls: Tls | None, token: str) -> str:
    async with AsyncClient(address, tls=tls, token=token, timeout=10) as client:
        try:
            await client.info()
        except ServerError as error:
            return "TOKEN" if error.reason.startswith("TOKEN_") else error.code
        return "OK"


async def test_all_calls_of_the_client_are_authorised(files: Files) -> None:
    tls, token = Tls(files.ours.cert), TOKENS["right"]
    async with (
        serving(tls=tls, auth_token_file=str(files.tokens), **files.tls) as server,
        AsyncClient(server.address, tls=tls, token=token) as client,
    ):
        assert [plan.tokens for plan in await client.plan([(16, 16)])] == [4]
        encoded = [embedding async for embedding in client.encode([b"no image"], return_errors=True)]
        assert isinstance(encoded[0], ServerError)
        assert encoded[0].reason == "IMAGE_INVALID", "it was let in"
        assert await client.health() == "SERVING"


def shown_by(address: str, tls: Tls) -> str:
    """The certificate that a server shows."""
    assert tls.ca is not None
    return ssl.get_server_certificate(split_address(address), ca_certs=str(tls.ca), timeout=10)


async def test_rotation_without_a_restart(files: Files, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    served = Issued(tmp_path / "cert", tmp_path / "key")
    install(files.server, served)
    tls = Tls(files.ours.cert)
    young = files.ours.issue("young")
    async with serving(tls=tls, tls_cert=str(served.cert), tls_key=str(served.key)) as server:
        assert await shown(server.address, tls) == read(files.server.cert)
        install(young, served)
        assert await shown(server.address, tls) == read(young.cert)
        assert await outcome(server.address, tls, "") == "OK"
        caplog.clear()
        served.key.write_text("broken")
        assert await shown(server.address, tls) == read(young.cert), "the last good one"
        await until(lambda: "are not used" in caplog.text)
        install(files.server, served)
        assert await shown(server.address, tls) == read(files.server.cert)


async def test_a_front_end_that_starts_with_broken_files(files: Files, tmp_path: Path) -> None:
    served = Issued(tmp_path / "cert", tmp_path / "key")
    install(files.server, served)
    settings = {"tls_cert": str(served.cert), "tls_key": str(served.key)}
    good = CredentialFiles(Config(model="tiny", **settings)).last_good()
    served.key.write_text("broken")
    tls, young = Tls(files.ours.cert), files.ours.issue("later")
    async with serving(tls=tls, good=good, **settings) as server:
        assert await shown(server.address, tls) == read(files.server.cert)
        install(young, served)
        assert await shown(server.address, tls) == read(young.cert)


async def shown(address: str, tls: Tls) -> str:
    return await asyncio.to_thread(shown_by, address, tls)


def install(issued: Issued, served: Issued) -> None:
    shutil.copy(issued.cert, served.cert)
    shutil.copy(issued.key, served.key)


def read(path: Path) -> str:
    return path.read_text()


def test_half_a_certificate() -> None:
    with pytest.raises(ValueError, match="give cert and key, or neither"):
        opticnerve.Tls(cert="cert.pem")


async def test_files_that_the_client_cannot_read(tmp_path: Path) -> None:
    async with AsyncClient("127.0.0.1:1", tls=Tls(tmp_path / "none")) as client:
        with pytest.raises(FileNotFoundError):
            await client.info()


def test_a_whole_server(files: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The service's port asks for a certificate and a token; those of health and metrics for nothing."""
    write_checkpoint("qwen3_vl", tmp_path / "model", seed=0)
    flags = {**files.tls, "tls_client_ca": files.ours.cert, "auth_token_file": files.tokens, "token_budgets": "64"}
    words = [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    token = tmp_path / "token"
    token.write_text(TOKENS["right"] + "\n")
    with running(tmp_path / "model", tmp_path, *words) as server:
        here = ["--server", server.address, "--json"]
        tls = ["--tls-ca", str(files.ours.cert), "--tls-cert", str(files.client.cert), "--tls-key"]
        allowed = [*here, *tls, str(files.client.key), "--token-file", str(token)]
        assert client_cli.main(["plan", *allowed, "64x64"]) == 0
        assert json.loads(capsys.readouterr().out)[0]["plan"]["tokens"]
        assert client_cli.main(["plan", *allowed[:-2], "64x64"]) == 1
        assert "TOKEN_MISSING" in capsys.readouterr().err
        assert client_cli.main(["plan", *here, "64x64"]) == 1
        assert client_cli.main(["health", "--server", server.health_address]) == 0
        assert client_cli.main(["info", "--server", server.health_address]) == 0
        assert server.total("opticnerve_rejected_total", reason="auth") == 1
        assert TOKENS["right"] not in (tmp_path / "log").read_text()


BROKEN = {
    "tls_cert is set without tls_key": {"tls-cert": "server.pem"},
    "tls_key is set without tls_cert": {"tls-key": "server.key"},
    "tls_client_ca is set without tls_cert": {"tls-client-ca": "ca.pem"},
    "are no pair in PEM (KEY_VALUES_MISMATCH)": {"tls-cert": "server.pem", "tls-key": "client.key"},
    "cannot read tls_cert": {"tls-cert": "none.pem", "tls-key": "server.key"},
    "tls_client_ca": {"tls-cert": "server.pem", "tls-key": "server.key", "tls-client-ca": "server.key"},
}


@pytest.mark.parametrize("told", BROKEN)
def test_a_server_does_not_start_with_broken_files(told: str, files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    named = {flag: str(files.server.cert.with_name(name)) for flag, name in BROKEN[told].items()}
    words = [word for flag, path in named.items() for word in (f"--{flag}", path)]
    assert cli.main(["serve", "--model", "preset:qwen3-vl-2b", "--load-format", "dummy", *words]) == 2
    assert told in capsys.readouterr().err


def test_the_clients_cli_wants_both_halves(files: Files) -> None:
    with pytest.raises(SystemExit) as exit:
        client_cli.main(["info", "--tls-cert", str(files.client.cert)])
    assert exit.value.code == 2
