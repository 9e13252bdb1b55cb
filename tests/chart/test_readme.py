"""What the README tells a newcomer to a cluster works, as far as it can without one."""

from __future__ import annotations

import shlex
from pathlib import Path

from helm import helm, named
from opticnerve_server import __version__

ROOT = Path(__file__).resolve().parents[2]


def blocks() -> dict[str, str]:
    """The code blocks of the section, by their language."""
    section = (ROOT / "README.md").read_text().split("## On a cluster\n")[1].split("\n## ")[0]
    return dict(block.split("\n", 1) for block in section.split("```")[1::2])


def test_the_values_are_those_of_the_tested_profile() -> None:
    assert blocks()["yaml"] == named("gpu").read_text()


def test_the_command_installs_the_image_that_was_built(tmp_path: Path) -> None:
    build, install = blocks()["sh"].splitlines()
    values = tmp_path / "values.yaml"
    values.write_text(blocks()["yaml"])
    words = [str(values) if word == "values.yaml" else word for word in shlex.split(install)]
    assert words.pop(0) == "helm"
    words[words.index("helm/opticnerve")] = str(ROOT / "helm/opticnerve")
    run = helm(*words, "--dry-run=client")
    assert run.returncode == 0, run.stderr
    tag = build.split()[-1]
    assert tag.endswith(f":{__version__}")
    assert f"image: {tag}\n" in run.stdout
