"""The file of tokens: what it may say, what a call must show, what a change does."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import pytest

from opticnerve_server import cli
from opticnerve_server.auth import Tokens
from opticnerve_server.errors import ServiceError
from opticnerve_server.settings import ConfigError

RED, BLUE, GREEN = ("red-token-0123456789", "blue-token+/~.-123==", "green-token-012345678")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(f"# whoever calls\n\nred:{RED}\nblue:{BLUE}\nred:{GREEN}\n")
    return path


def refusal(tokens: Tokens, authorization: str | bytes | None) -> str:
    with pytest.raises(ServiceError) as caught:
        tokens.tenant_of(authorization)
    assert RED not in str(caught.value)
    return caught.value.reason


def test_tenants(file: Path) -> None:
    tokens = Tokens(file)
    assert [tokens.tenant_of(f"Bearer {token}") for token in (RED, BLUE, GREEN)] == ["red", "blue", "red"]
    assert tokens.tenant_of(f"bearer   {BLUE} ") == "blue"
    assert tokens.tenant_of(f"Bearer {RED}".encode()) == "red"


@pytest.mark.parametrize("authorization", [None, "", "Bearer", "Bearer ", f"Basic {RED}", RED, b"\xff"])
def test_missing(file: Path, authorization: str | bytes | None) -> None:
    assert refusal(Tokens(file), authorization) == "TOKEN_MISSING"


@pytest.mark.parametrize(
    "token", ["x", RED[:-1], RED + "1", RED.upper(), f"red:{RED}", f"{RED} {RED}", "\u20ac\u20ac", "a" * 100_000]
)
def test_invalid(file: Path, token: str) -> None:
    assert refusal(Tokens(file), f"Bearer {token}") == "TOKEN_INVALID"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "has no token"),
        (b"# red:red-token-0123456789\n", "has no token"),
        (b"red red-token-0123456789", "line 1 of auth_token_file"),
        (b"\nred:red token 0123456789", "line 2 of auth_token_file"),
        (b":red-token-0123456789", "is not TENANT:TOKEN"),
        (b"re d:red-token-0123456789", "is not TENANT:TOKEN"),
        (b"red:short", "a token of 5 characters: make it 16 or more"),
        (b"red:red-token-0123456789\nblue:red-token-0123456789", "gives the token of another tenant"),
        (b"red:\xff\xfe-token-0123456789", "is not ASCII text"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, content: bytes, told: str) -> None:
    path = tmp_path / "tokens"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=told) as caught:
        Tokens(path)
    assert "red-token" not in str(caught.value)


def test_a_change_counts_from_the_next_call_on(file: Path) -> None:
    tokens = Tokens(file)
    file.write_text(f"blue:{BLUE}\n")
    assert refusal(tokens, f"Bearer {RED}") == "TOKEN_INVALID"
    assert tokens.tenant_of(f"Bearer {BLUE}") == "blue"


def test_a_change_behind_links(tmp_path: Path) -> None:
    """As Kubernetes renews a secret: the link that the file's link leads through is replaced."""
    for version, token in (("v1", RED), ("v2", BLUE)):
        (tmp_path / version).mkdir()
        (tmp_path / version / "tokens").write_text(f"red:{token}")
    (tmp_path / "data").symlink_to("v1")
    (tmp_path / "tokens").symlink_to("data/tokens")
    tokens = Tokens(tmp_path / "tokens")
    assert tokens.tenant_of(f"Bearer {RED}") == "red"
    (tmp_path / "next").symlink_to("v2")
    os.rename(tmp_path / "next", tmp_path / "data")
    assert tokens.tenant_of(f"Bearer {BLUE}") == "red"
    assert refusal(tokens, f"Bearer {RED}") == "TOKEN_INVALID"


def test_a_file_that_breaks_keeps_the_last_good_tokens(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokens = Tokens(file)
    good = file.read_text()
    for broken in (lambda: file.write_text("nonsense"), file.unlink):
        caplog.clear()
        broken()
        with caplog.at_level(logging.INFO):
            assert [tokens.tenant_of(f"Bearer {RED}") for _ in range(3)] == ["red"] * 3
        assert [record.levelname for record in caplog.records] == ["ERROR"], "once a change"
    caplog.clear()
    file.write_text(good.replace(RED, RED[::-1]))
    with caplog.at_level(logging.INFO):
        assert tokens.tenant_of(f"Bearer {RED[::-1]}") == "red"
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert RED[::-1] not in caplog.text


def test_looking_at_the_file_costs_a_call_next_to_nothing(file: Path) -> None:
    tokens = Tokens(file)
    started = time.perf_counter()
    for _ in range(100):
        tokens.tenant_of(f"Bearer {BLUE}")
    assert (time.perf_counter() - started) / 100 < 0.002


@pytest.mark.parametrize("command", ["serve", "check"])
def test_a_server_does_not_start_with_a_broken_file(
    command: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text("red:short")
    preset = ["--model", "preset:qwen3-vl-2b", "--load-format", "dummy"]
    assert cli.main([command, *preset, "--auth-token-file", str(file)]) == 2
    assert "make it 16 or more" in capsys.readouterr().err
    assert cli.main([command, *preset, "--auth-token-file", "/no/such/file"]) == 2
    assert "cannot read auth_token_file = /no/such/file" in capsys.readouterr().err
