"""What a bench leaves behind: its tables on standard output, its figures as JSON, a plot of them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..settings import ConfigError
from . import plot

Figures = dict[str, Any]


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="FILE", help="write the figures to this file")
    parser.add_argument("--plot", metavar="FILE.svg", type=plot.target, help="draw them, as .svg or .png")
    parser.add_argument(
        "--from", dest="given", metavar="FILE.json", help="measure nothing: print and draw what --json has written"
    )


def report(
    bench: str,
    options: argparse.Namespace,
    measure: Callable[[], Figures],
    markdown: Callable[[Figures], str],
    draw: Callable[[Figures], plot.Figure],
) -> None:
    """Measure, or read what was measured elsewhere, and say it in every way that was asked for. Raises ConfigError."""
    if options.plot:
        plot.matplotlib()  # before the minutes of measuring, and not behind them
    for path in filter(None, (options.json, options.plot)):
        if not Path(path).absolute().parent.is_dir():
            raise ConfigError(f"cannot write {path}: its directory is not there; make it first")
    figures = _read(bench, options.given) if options.given else {"bench": bench, **measure()}
    print(markdown(figures))
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(figures, file, indent=1)
    if options.plot:
        plot.write(draw(figures), options.plot)


def _read(bench: str, path: str) -> Figures:
    try:
        with open(path, encoding="utf-8") as file:
            figures: Figures = json.load(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read --from {path}: {error}; name a file that --json has written") from error
    if not isinstance(figures, dict) or figures.get("bench") != bench:
        raise ConfigError(f"--from {path} has no figures of bench {bench}: name a file that its --json has written")
    return figures
