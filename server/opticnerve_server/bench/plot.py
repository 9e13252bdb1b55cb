"""The plots of the benches, of the figures that their --json writes. matplotlib is imported when one is asked for."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..settings import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Figure

SUFFIXES = (".svg", ".png")

BLUE, ORANGE, GREEN, GREY = "#1f5fa8", "#d9731a", "#2a8f5b", "#8a8a8a"


def target(path: str) -> str:
    """A file to draw to, as a flag gives it. Raises argparse.ArgumentTypeError."""
    if Path(path).suffix not in SUFFIXES:
        raise argparse.ArgumentTypeError(f"{path!r} is no plot: let it end with {' or '.join(SUFFIXES)}")
    return path


def matplotlib() -> Any:
    """The package. Raises ConfigError where it is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError(
            "--plot needs matplotlib: pip install 'opticnerve[server,bench]'; or write --json here and draw it by "
            "--from where it is installed"
        ) from error
    return matplotlib


def write(figure: Figure, path: str) -> None:
    """As .svg, its text being text, or as .png."""
    with matplotlib().rc_context({"svg.fonttype": "none", "svg.hashsalt": "opticnerve"}):
        metadata = {"Date": None} if path.endswith(".svg") else {}
        figure.savefig(path, dpi=150, metadata=metadata)


def ceiling(figures: Mapping[str, Any]) -> Figure:
    """Time against tokens for both fillings, the budgets marked; below, how far replays are from the ceiling."""
    figure, axes = _panels(f"{figures['model']}, {figures['device']}, {figures['dtype']}", 2, 2, (11, 7), [3, 1.4])
    dots: dict[str, Any] = {"marker": "o", "markersize": 3.5}
    for column, (filling, title) in enumerate((("images of 441", "images of 441 tokens"), ("one image", "one image"))):
        rows = [row for row in figures["rows"] if row["filling"] == filling]
        times, ratios = axes[0][column], axes[1][column]
        tokens = [row["tokens"] for row in rows]
        styles: list[tuple[str, str, dict[str, Any]]] = [
            ("eager_ms", "eager, host and device", {"color": ORANGE}),
            ("replay_ms", "replay, by budget", {"color": BLUE, **dots}),
            ("ceiling_ms", "products and attention alone", {"color": GREEN, "linestyle": "--"}),
        ]
        for name, label, style in styles:
            times.plot(tokens, [row[name] for row in rows], label=label, **style)
        times.set(title=f"a budget filled by {title}", xscale="log", yscale="log", ylabel="milliseconds a batch")
        times.legend(loc="upper left")
        ratios.plot(tokens, [row["replay_ms"] / row["ceiling_ms"] for row in rows], color=BLUE, **dots)
        ratios.axhline(1, color=GREEN, linestyle="--")
        ratios.set(xscale="log", xlabel="tokens of the batch", ylabel="replay / ceiling")
        for ax in (times, ratios):
            _numbers(ax, "x", [row["budget"] for row in figures["rows"]])
        _numbers(times, "y", [])
    axes[1][0].set_ylim(bottom=0.9)
    return figure


def serve(figures: Mapping[str, Any]) -> Figure:
    """Latency against load; hit ratio, padding and busy share beside it."""
    runs = sorted(figures["runs"], key=lambda run: run["items_s"])
    open_loop = [run for run in runs if run["share"]]
    (capacity,) = (run["items_s"] for run in runs if not run["share"])
    figure, axes = _panels(f"{figures['model']}, {figures['about']}", 1, 2, (11, 4.2), [1])
    latency, shares = axes[0]
    load = [run["items_s"] for run in open_loop]
    for name, color in (("p50", BLUE), ("p90", GREEN), ("p99", ORANGE)):
        latency.plot(load, [run[name] for run in open_loop], color=color, marker="o", markersize=4, label=name)
    latency.axvline(capacity, color=GREY, linestyle="--", label="saturated")
    latency.set(
        title="latency of a call", xlabel="images a second", ylabel="milliseconds", yscale="log", xlim=(0, None)
    )
    latency.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=4, frameon=False)
    _numbers(latency, "y", [])
    load = [run["items_s"] for run in runs]
    for name, label, color in (
        ("hit", "dispatches that replay a graph", BLUE),
        ("padding", "padding of what replays compute", ORANGE),
        ("busy", "time that the device is busy", GREEN),
    ):
        shares.plot(load, [100 * run[name] for run in runs], color=color, marker="o", markersize=4, label=label)
    shares.axvline(capacity, color=GREY, linestyle="--", label="saturated")
    shares.set(title="hits, padding, device", xlabel="images a second", ylabel="percent", ylim=(0, 105), xlim=(0, None))
    shares.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, frameon=False)
    return figure


def tower(figures: Mapping[str, Any]) -> Figure:
    """Time of a call against its tokens by each policy, the budgets marked, and how much faster ours is."""
    if "rows" not in figures:
        raise ConfigError("a table of attention backends has no plot: leave --plot out")
    rows = sorted(figures["rows"], key=lambda row: row["tokens"])
    figure, axes = _panels(f"{figures['model']}, {figures['device']}, {figures['dtype']}", 1, 2, (11, 4.4), [1])
    times, ratios = axes[0]
    tokens = [row["tokens"] for row in rows]
    for name, color, marker in (("eager", GREY, "x"), ("greedy", ORANGE, "s"), ("ours", BLUE, "o")):
        if name in rows[0]:
            took = [row[name]["median"] for row in rows]
            times.plot(tokens, took, color=color, marker=marker, markersize=4, linestyle="none", label=name)
            if name != "ours":
                ratio = [row[name]["median"] / row["ours"]["median"] for row in rows]
                ratios.plot(tokens, ratio, color=color, marker=marker, markersize=4, linestyle="none", label=name)
    ratios.axhline(1, color=BLUE, linestyle="--", label="ours")
    times.set(
        title="one call, its pixels and rows on the device", ylabel="milliseconds, median", xscale="log", yscale="log"
    )
    ratios.set(title="the same, over ours", ylabel="time / time of ours", xscale="log", yscale="log")
    for ax in (times, ratios):
        ax.set_xlabel("tokens of the batch")
        ax.legend()
        _numbers(ax, "x", figures["budgets"])
        _numbers(ax, "y", [])
    return figure


def _panels(
    title: str, rows: int, columns: int, size: tuple[float, float], heights: Sequence[float]
) -> tuple[Figure, list[list[Axes]]]:
    """Axes in rows without a frame above and to the right, and with a light grid."""
    matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(title, fontsize=11)
    axes = figure.subplots(
        rows,
        columns,
        squeeze=False,
        sharex="all" if rows > 1 else "none",
        sharey="row" if rows > 1 else "none",
        height_ratios=heights,
    )
    for ax in axes.flat:
        ax.grid(color="#e4e4e4", linewidth=0.7)
        ax.set_axisbelow(True)
        ax.spines[["top", "right"]].set_visible(False)
    return figure, axes.tolist()


def _numbers(ax: Axes, axis: str, marks: Sequence[float]) -> None:
    """Plain numbers on a logarithmic axis, and small marks where they are asked for."""
    from matplotlib.ticker import FixedLocator, LogLocator, NullFormatter, ScalarFormatter

    which = ax.xaxis if axis == "x" else ax.yaxis
    which.set_major_locator(LogLocator(base=2 if marks else 10, subs=(1.0,) if marks else (1.0, 2.0, 5.0)))
    which.set_major_formatter(ScalarFormatter())
    which.set_minor_formatter(NullFormatter())
    if marks:
        which.set_minor_locator(FixedLocator(sorted(set(marks))))
