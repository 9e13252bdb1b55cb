"""What `helm install` refuses, and what it says; what it notes."""

from __future__ import annotations

from pathlib import Path

import pytest

from helm import CHART, RELEASE, helm, named, render, server, template

TYPOS = {
    "a key of the chart": ("repliacs=2", "'repliacs' not allowed"),
    "a key of a group": ("image.repo=x", "'repo' not allowed"),
    "a setting of the server": ("server.drain_dely=5", "'drain_dely' not allowed"),
    "a setting that is the chart's": ("server.listen=0.0.0.0:1", "'listen' not allowed"),
    "a word that is no choice": ("server.device=gpu", "value must be one of 'auto', 'cpu', 'cuda'"),
    "a word for a number": ("server.max_queue_items=many", "want integer"),
    "a number over its limit": ("server.max_queue_items=5000", "maximum: got 5,000, want 4,096"),
    "no room to drain": ("server.grace=null", "missing property 'grace'"),
    "a source of weights": ("model.source=s3", "must be one of 'claim', 'hub', 'image', 'demo'"),
    "a branch instead of a commit": ("model.hub.revision=main", "does not match pattern"),
    "two scalers": ("autoscaling.keda.enabled=true,autoscaling.hpa.enabled=true", "'not' failed"),
    "no server that could see a queue": ("autoscaling.minReplicas=0", "minimum: got 0, want 1"),
    "authorities without TLS": ("tls.clientCertificates=true", "minLength: got 0, want 1"),
    "a port": ("ports.grpc=99999", "maximum: got 99,999, want 65,535"),
    "callers that are nobody, which is everybody": ("networkPolicy.callers=null", "callers"),
}


@pytest.mark.parametrize("name", TYPOS)
def test_the_schema_refuses(name: str) -> None:
    setting, said = TYPOS[name]
    run = template(named("default"), setting)
    assert run.returncode != 0
    assert said in run.stderr


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["image.repository="], "image.repository is not set"),
        (["model.claim="], "model.claim is not set"),
        (["model.source=image", "model.path="], "model.path is not set"),
        (["model.source=hub"], "model.hub.repository is not set"),
        (["model.source=hub", "model.hub.repository=a/b"], "model.hub.revision is not set"),
        (["autoscaling.keda.enabled=true"], "autoscaling.keda.prometheus is not set"),
    ],
)
def test_what_is_needed_is_asked_for_by_name(settings: list[str], said: str) -> None:
    run = template(named("default"), *settings)
    assert run.returncode != 0
    assert said in run.stderr


def test_no_values_at_all_say_what_is_missing() -> None:
    assert "is not set" in template(None).stderr


def notes(profile: Path, *settings: str) -> str:
    sets = [word for setting in settings for word in ("--set", setting)]
    run = helm("install", RELEASE, CHART, "--values", profile, "--dry-run=client", "--namespace", "encoders", *sets)
    assert run.returncode == 0, run.stderr
    return run.stdout.partition("NOTES:")[2]


def test_the_notes_say_how_to_dial() -> None:
    plain = notes(named("default"))
    assert '"dns:///vision-opticnerve-headless.encoders.svc.cluster.local:50051"' in plain
    assert "NOTE: plaintext" in plain
    assert "NOTE: one replica" in plain
    secured = notes(named("tls-token"), "replicas=2")
    assert 'tls=opticnerve.Tls("ca.crt", "client.crt", "client.key")' in secured
    assert "token=token" in secured
    assert "NOTE" not in secured.replace("NOTES", "")


def test_the_python_of_the_notes_is_python() -> None:
    for profile in ("default", "tls-token"):
        text = notes(named(profile))
        code = text[text.index("  import opticnerve") : text.index("Other gRPC clients")]
        compile("\n".join(line.removeprefix("  ") for line in code.splitlines()), "notes", "exec")


def test_a_preset_is_served_without_any_weights() -> None:
    settings = ("model.source=image", "model.path=preset:qwen3-vl-8b", "server.load_format=dummy")
    assert "--model=preset:qwen3-vl-8b" in server(render(named("default"), *settings))["args"]
