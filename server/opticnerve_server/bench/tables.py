"""The tables of `bench tower`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from .backends import Row, markdown
from .batches import BATCHES

MANY_TOKENS = 2560
"""Above, greedy packing's next budget is its largest or nearly twice as large, where ours are 9 percent apart."""


def tower_markdown(figures: Mapping[str, Any]) -> str:
    """All that a run has measured."""
    if "backends" in figures:
        return markdown([Row(**row) for row in figures["backends"]])
    said = [
        f"{figures['model']}, {figures['device']}, torch {figures['torch']}, {figures['dtype']}, "
        f"attention {figures['attention']}, kernels {figures['kernels']}; {figures['graphs']} graphs, "
        f"{figures['graph_mib']} MiB, captured in {figures['capture_s']:.1f} s, loaded in {figures['load_s']:.1f} s, "
        f"tested in {figures['selftest_s']:.1f} s"
    ]
    rows = figures["rows"]
    if rows:
        said.append("\n".join(_batches(rows)))
        said += _compared(rows)
    if "images_s" in figures:
        said.append("| images of 336 x 336 a call | images/s, saturated |\n|---|---|")
        said[-1] += "".join(f"\n| {images} | {rate:.0f} |" for images, rate in figures["images_s"].items())
        host = figures["host"]
        said.append(
            f"Batches of 8 images, one behind another: {host['period_ms']:.3f} ms each, {host['replay_ms']:.3f} in the "
            f"replay and {host['between_ms']:.3f} between two; the device thread spends {host['launch_ms']:.3f} ms."
        )
    return "\n\n".join(said)


def _batches(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Medians, and in brackets mean and 99th percentile, in milliseconds."""
    columns = ["slots", "ours", "greedy", "eager"]
    columns = [name for name in columns if any(name in row for row in rows)]
    extra = [name for name in ("transformers_ms", "error") if name in rows[0]]
    heads = [f"{name} ms (mean, p99)" for name in columns]
    lines = [
        f"| batch | tokens | budgets | {' | '.join([*heads, 'replay ms', 'ceiling ms', 'replay / ceiling', *extra])} |"
    ]
    lines.append("|---" * (lines[0].count("|") - 1) + "|")
    for row in rows:
        cells = [row["batch"], str(row["tokens"]), _budgets(row["ours"])]
        cells += [_times(row.get(name)) for name in columns]
        replay, ceiling = row.get("replay_ms"), row.get("ceiling_ms")
        cells += [_ms(replay), _ms(ceiling), f"{replay / ceiling:.3f}" if replay and ceiling else ""]
        cells += [f"{row[name]:.3g}" for name in extra if name in row]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _compared(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """How much faster ours is, over the named batches and over the random ones."""
    said = []
    named = [row for row in rows if row["batch"] in BATCHES]
    random = [row for row in rows if row["batch"] not in BATCHES]
    for other in ("greedy", "eager"):
        for what, some in ((f"{len(named)} batches", named), (f"{len(random)} random ones", random)):
            if some and other in some[0]:
                ratio = geometric_mean(row[other]["median"] / row["ours"]["median"] for row in some)
                said.append(f"ours is {ratio:.3f} times as fast as {other} over {what} (geometric mean).")
    for what, some in (("batches", named), ("random batches", random)):
        if some:
            share = sum(row["tokens"] > MANY_TOKENS for row in some) / len(some)
            said.append(f"{share:.0%} of the {what} have more than {MANY_TOKENS} tokens.")
    return said


def geometric_mean(ratios: Any) -> float:
    return statistics.geometric_mean(list(ratios))


def _budgets(times: Mapping[str, Any]) -> str:
    return " + ".join(str(budget) if budget else "eager" for budget in times["budgets"])


def _times(times: Mapping[str, Any] | None) -> str:
    return f"{times['median']:.3f} ({times['mean']:.3f}, {times['p99']:.3f})" if times else ""


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
