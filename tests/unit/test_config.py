"""Settings: precedence, sources, refusals with a remedy, and the defaults that depend on the machine."""

from __future__ import annotations

import argparse
import dataclasses
import re
from pathlib import Path

import pytest

from opticnerve_server import config as config_module
from opticnerve_server import messages
from opticnerve_server.config import MAX_QUEUE_ITEMS, Config, load, parse_token_budgets
from opticnerve_server.settings import ConfigError, add_flags, flag, parse_arguments, settings_of, variable

MODEL = {"model": "/models/tiny"}


def write(path: Path, text: str) -> dict[str, str]:
    path.write_text(text)
    return MODEL | {"config": str(path)}


# --- precedence


def test_flag_over_environment_over_file_over_default(tmp_path: Path) -> None:
    flags = write(tmp_path / "c.toml", "grace = 1\ndrain_delay = 1\nmax_queue_items = 1\n")
    environment = {"OPTICNERVE_GRACE": "2", "OPTICNERVE_DRAIN_DELAY": "2"}
    resolved = load(flags | {"grace": "3"}, environment)
    assert (resolved.config.grace, resolved.sources["grace"]) == (3.0, "from flag --grace")
    assert (resolved.config.drain_delay, resolved.sources["drain_delay"]) == (2.0, "from env OPTICNERVE_DRAIN_DELAY")
    assert (resolved.config.max_queue_items, resolved.sources["max_queue_items"]) == (1, f"from file {tmp_path}/c.toml")
    assert resolved.config.max_request_bytes == 32 << 20
    assert resolved.sources["max_request_bytes"].startswith("default: ")
    assert set(resolved.sources) == {field.name for field in dataclasses.fields(Config)}


def test_the_file_can_be_named_by_the_environment(tmp_path: Path) -> None:
    write(tmp_path / "c.toml", "model = 'preset:qwen3-vl-2b'")
    assert load({}, {"OPTICNERVE_CONFIG": f"{tmp_path}/c.toml"}).config.model == "preset:qwen3-vl-2b"


def test_every_kind_of_file_value(tmp_path: Path) -> None:
    flags = write(
        tmp_path / "c.toml",
        'graphs = false\ngrace = 0.5\nmax_item_tokens = "none"\ntoken_budgets = [512, 64]\nmodalities = ["image"]\n',
    )
    config = load(flags, {}).config
    assert (config.graphs, config.grace, config.max_item_tokens) == (False, 0.5, None)
    assert (config.token_budgets, config.modalities) == ("512,64", "image")


def test_config_is_frozen_and_slotted() -> None:
    config = Config(model="x")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.grace = 1.0  # type: ignore[misc]
    assert not hasattr(config, "__dict__")


def test_every_default_passes_its_own_parser() -> None:
    config = Config(model="x")
    for name, declared in settings_of(Config).items():
        value = getattr(config, name)
        text = "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
        assert declared.parse(text) == value, name


def test_every_setting_has_help_and_a_reason() -> None:
    for name, declared in settings_of(Config).items():
        assert declared.help.endswith("."), name
        assert declared.reason.endswith("."), name


# --- refusals


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("max_queue_items", "0", "at least 1"),
        ("max_queue_items", "-3", "at least 1"),
        ("max_queue_items", "many", "whole number"),
        ("max_queue_items", "1.5", "whole number"),
        ("max_queue_items", str(MAX_QUEUE_ITEMS + 1), f"at most {MAX_QUEUE_ITEMS}"),
        ("max_token_budget", "0", "at least 1, or none, or auto"),
        ("max_token_budget", "-1", "at least 1"),
        ("max_token_budget", "", "whole number"),
        ("max_items_per_batch", "0", "at least 1, or none"),
        ("graph_memory_bytes", "8GB", "whole number, or none"),
        ("token_budgets", "512,0", "not positive"),
        ("token_budgets", "-64", "not positive"),
        ("token_budgets", "64,,128", "no budget"),
        ("token_budgets", "64,64", "twice"),
        ("token_budgets", "64 128", "one list a path"),
        ("token_budgets", "=64", "one list a path"),
        ("token_budgets", "local=1 local=2", "one list a path"),
        ("token_budgets", "local=1 2", "one list a path"),
        ("token_budgets", "1e3", "no budget"),
        ("dtype", "bf16", "bfloat16"),
        ("device", "gpu", "auto, cpu, cuda"),
        ("graphs", "yes", "true or false"),
        ("listen", "50051", "host:port"),
        ("listen", ":50051", "host:port"),
        ("listen", "::1:50051", "brackets"),
        ("listen", "localhost:http", "0 to 65535"),
        ("listen", "localhost:65536", "0 to 65535"),
        ("grace", "-1", "0 or more"),
        ("grace", "nan", "0 or more"),
        ("grace", "inf", "0 or more"),
        ("grace", "5s", "number of seconds"),
        ("modalities", "image,audio", "image,video"),
        ("modalities", "image,image", "image,video"),
        ("modalities", "", "image,video"),
        ("alpha_background", "white", "#rrggbb"),
        ("model", "", "directory"),
    ],
)
def test_a_bad_value_names_setting_source_and_remedy(name: str, value: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        load({}, {"OPTICNERVE_MODEL": "m", variable(name): value})
    assert name in str(refusal.value)
    assert variable(name) in str(refusal.value)
    assert remedy in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("max_queue_item = 1", "did you mean max_queue_items?"),
        ("max-queue-items = 1", "did you mean max_queue_items?"),
        ("zzz = 1", "unknown key 'zzz'"),
        ("grace = ", "not TOML"),
        ("grace = 1979-05-27", "write a string, a number"),
        ("[grace]\na = 1", "write a string, a number"),
        ("graphs = 1", "true or false"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, text: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(remedy)):
        load(write(tmp_path / "c.toml", text), {})


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load(MODEL | {"config": f"{tmp_path}/none.toml"}, {})


def test_the_model_is_required() -> None:
    with pytest.raises(ConfigError, match="--model, OPTICNERVE_MODEL or the file key model"):
        load({}, {})


def test_contradictions_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_request_bytes = 33554432 is over max_queue_bytes = 1000"):
        load(MODEL | {"max_queue_bytes": "1000"}, {})
    with pytest.raises(ConfigError, match="budget 512 of token_budgets is over max_token_budget = 256"):
        load(MODEL | {"token_budgets": "64,512", "max_token_budget": "256"}, {})
    with pytest.raises(ConfigError, match="path local"):
        load(MODEL | {"token_budgets": "global=64 local=512", "max_token_budget": "256"}, {})
    assert load(MODEL | {"token_budgets": "64,9999"}, {}).config.token_budgets == "64,9999"


# --- environment


def test_unknown_variables_are_warned_of() -> None:
    warnings = load(MODEL, {"OPTICNERVE_GRASE": "1", "OPTICNERVE_ZZZ": "1", "GRACE": "1"}).warnings
    assert warnings == [
        "unknown variable OPTICNERVE_GRASE: did you mean OPTICNERVE_GRACE?",
        "unknown variable OPTICNERVE_ZZZ",
    ]


def test_service_links_are_passed_over() -> None:
    links = {
        "OPTICNERVE_SERVICE_HOST": "10.0.0.1",
        "OPTICNERVE_SERVICE_PORT": "50051",
        "OPTICNERVE_SERVICE_PORT_GRPC": "50051",
        "OPTICNERVE_PORT": "tcp://10.0.0.1:50051",
        "OPTICNERVE_PORT_50051_TCP": "tcp://10.0.0.1:50051",
        "OPTICNERVE_PORT_50051_TCP_ADDR": "10.0.0.1",
        "OPTICNERVE_HEADLESS_PORT_50052_UDP_PROTO": "udp",
        "OPTICNERVE_HEADLESS_SERVICE_HOST": "None",
    }
    assert load(MODEL, links).warnings == []
    assert load(MODEL, {"OPTICNERVE_PORT": "50051"}).warnings == ["unknown variable OPTICNERVE_PORT"]


# --- flags


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(made, Config)
    return made


def test_flags_arrive_as_text_and_only_when_given() -> None:
    given = vars(parse_arguments(parser(), ["--model", "m", "--no-graphs", "--max-token-budget=none"]))
    assert given == {"model": "m", "graphs": "false", "max_token_budget": "none"}
    config = load(given, {}).config
    assert (config.graphs, config.max_token_budget, config.token_cap("cuda")) == (False, None, None)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--max-queue-item", "3"], "did you mean --max-queue-items?"),
        (["--drain", "3"], "unknown argument --drain"),
        (["--grce=3"], "unknown argument --grce: did you mean --grace?"),
        (["--grace"], "expected one argument"),
    ],
)
def test_an_unknown_flag_exits_with_2_and_the_nearest(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit:
        parse_arguments(parser(), arguments)
    assert exit.value.code == 2
    assert said in capsys.readouterr().err


def test_help_names_every_flag_with_the_reason_of_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(parser(), ["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for name, declared in settings_of(Config).items():
        assert flag(name) in shown
        assert declared.reason.replace("-", "") in shown.replace("-", ""), name


# --- values


@pytest.mark.parametrize(
    ("text", "budgets"),
    [
        ("", {}),
        ("1024,512", {"": (512, 1024)}),
        ("global=272,544 local=200,100", {"global": (272, 544), "local": (100, 200)}),
    ],
)
def test_token_budgets(text: str, budgets: dict[str, tuple[int, ...]]) -> None:
    assert parse_token_budgets(text) == budgets


def test_the_automatic_cap_depends_on_the_device() -> None:
    assert Config(model="x").token_cap("cuda") == 5120
    assert Config(model="x").token_cap("cpu") == 1024
    assert load(MODEL | {"max_token_budget": "256"}, {}).config.token_cap("cpu") == 256


@pytest.mark.parametrize(("cores", "frontends", "threads"), [(1, 1, 1), (2, 1, 2), (8, 3, 2), (16, 6, 2), (128, 8, 16)])
def test_processes_and_threads_follow_the_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, frontends: int, threads: int
) -> None:
    monkeypatch.setattr(config_module, "cores", lambda: cores)
    config = load(MODEL, {}).config
    assert (config.frontends, config.preprocess_threads) == (frontends, threads)


def test_threads_are_split_over_the_front_ends_that_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_module, "cores", lambda: 8)
    assert load(MODEL | {"frontends": "4"}, {}).config.preprocess_threads == 2
    assert load(MODEL | {"frontends": "16"}, {}).config.preprocess_threads == 1
    assert load(MODEL | {"frontends": "4", "preprocess_threads": "9"}, {}).config.preprocess_threads == 9


def test_a_call_of_the_most_items_fits_in_one_message() -> None:
    most = 1 << 40
    item = messages.ItemRequest(most, most, most, most, bytes(32))
    call = messages.Reserve(most, list(range(MAX_QUEUE_ITEMS)), [item] * MAX_QUEUE_ITEMS)
    assert len(messages.encode(call)) <= messages.MAX_MESSAGE_BYTES


# --- SGLang

FRONT = {"sglang_listen": "127.0.0.1:0", "sglang_version": "0.5.23"}


def test_a_front_for_sglang_is_off_unless_it_is_asked_for() -> None:
    config = load(MODEL, {}).config
    assert (config.sglang_listen, config.sglang_grpc_listen, config.sglang_version) == (None, None, None)
    assert config.sglang_receivers == "caller"
    assert load(MODEL | FRONT | {"sglang_receivers": "10.0.0.0/8,fd00::/8"}, {}).config.sglang_version == "0.5.23"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"sglang_listen": "127.0.0.1:0"}, "sglang_listen is set without sglang_version: name the release"),
        ({"sglang_grpc_listen": "127.0.0.1:0"}, "sglang_grpc_listen is set without sglang_version"),
        (FRONT | {"sglang_version": "0.5.22"}, "write one of 0.5.23"),
        (FRONT | {"auth_token_file": "tokens"}, "a way around auth_token_file"),
        (FRONT | {"tls_cert": "a", "tls_key": "b"}, "a way around tls_cert"),
        (FRONT | {"sglang_receivers": "10.0.0.1/8"}, "host bits set"),
        (FRONT | {"sglang_receivers": "anyone"}, "anyone"),
    ],
)
def test_a_front_for_sglang_that_would_not_do_what_is_meant(flags: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(MODEL | flags, {})
