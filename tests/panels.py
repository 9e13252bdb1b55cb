"""The dashboard without Grafana: its queries asked of a Prometheus, and its panels drawn from the answers.

python tests/panels.py http://127.0.0.1:9090 dashboard.png [SECONDS]
"""

from __future__ import annotations

import json
import math
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

DASHBOARD = Path(__file__).parents[1] / "deploy" / "grafana" / "opticnerve.json"

Series = tuple[str, list[float], list[float]]
"""Legend, times in seconds, values."""


def panels() -> list[dict[str, Any]]:
    """Rows included."""
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return found


def ask(prometheus: str, path: str, **parameters: object) -> Any:
    """The data of an answer of Prometheus' HTTP API; raises urllib.error.HTTPError for a query it refuses."""
    with urllib.request.urlopen(f"{prometheus}/api/v1/{path}?{urllib.parse.urlencode(parameters)}") as answer:
        return json.load(answer)["data"]


def series_of(prometheus: str, target: dict[str, Any], end: float, seconds: float, interval: str) -> list[Series]:
    """What a target shows of the `seconds` before `end`, every namespace, release and pod included; NaN left out."""
    query = target["expr"].replace("$__rate_interval", interval)
    for variable in ("namespace", "release", "pod"):
        query = query.replace(f"${variable}", ".*")
    answer = ask(prometheus, "query_range", query=query, start=end - seconds, end=end, step=1)
    found = []
    for one in answer["result"]:
        points = [(float(at), float(value)) for at, value in one["values"] if not math.isnan(float(value))]
        if points:
            times, values = zip(*points, strict=True)
            found.append((legend(target["legendFormat"], one["metric"]), list(times), list(values)))
    return found


def legend(template: str, labels: dict[str, str]) -> str:
    for name, value in labels.items():
        template = template.replace(f"{{{{{name}}}}}", value)
    return template or ", ".join(f"{name}={value}" for name, value in labels.items() if not name.startswith("__"))


def draw(prometheus: str, picture: Path, seconds: float, interval: str = "5s") -> None:
    """A picture of all panels where the dashboard has them."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    end = time.time()
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels())
    figure = pyplot.figure(figsize=(24, height * 0.42))
    for panel in panels():
        at = panel["gridPos"]
        if panel["type"] == "row":
            figure.text(0.01, 1 - (at["y"] + 0.7) / height, panel["title"], fontsize=15, weight="bold")
            continue
        box = (
            at["x"] / 24 + 0.03,
            1 - (at["y"] + at["h"] - 1.2) / height,
            at["w"] / 24 - 0.045,
            (at["h"] - 2) / height,
        )
        axes = figure.add_axes(box)
        unit = panel["fieldConfig"]["defaults"]["unit"]
        axes.set_title(f"{panel['title']} [{unit}]", fontsize=10, loc="left")
        found = [s for target in panel["targets"] for s in series_of(prometheus, target, end, seconds, interval)]
        _PLOTS.get(panel["type"], plot_lines)(axes, panel, found, end)
    figure.savefig(picture, dpi=60)


def plot_lines(axes: Any, panel: dict[str, Any], found: list[Series], end: float) -> None:
    if not found:
        axes.text(0.5, 0.5, "no data", ha="center", color="gray", transform=axes.transAxes)
    stacked = panel["fieldConfig"]["defaults"].get("custom", {}).get("stacking", {}).get("mode") == "normal"
    grid = sorted({at for _, times, _ in found for at in times})
    if stacked and grid:
        values = [[dict(zip(times, ys, strict=True)).get(at, 0.0) for at in grid] for _, times, ys in found]
        axes.stackplot([at - end for at in grid], values, labels=[name for name, _, _ in found])
    else:
        for name, times, ys in found:
            axes.plot([at - end for at in times], ys, label=name)
    defaults = panel["fieldConfig"]["defaults"]
    axes.set_ylim(bottom=defaults["min"], top=defaults.get("max"))
    if found:
        axes.legend(fontsize=6, loc="upper left")


def plot_numbers(axes: Any, panel: dict[str, Any], found: list[Series], end: float) -> None:
    axes.axis("off")
    text = "\n".join(f"{name}: {values[-1]:g}" for name, _, values in found)
    axes.text(0.0, 0.9, text or "no data", fontsize=22 if panel["type"] == "stat" else 8, va="top", wrap=True)


def plot_timeline(axes: Any, panel: dict[str, Any], found: list[Series], end: float) -> None:
    for row, (_, times, _) in enumerate(found):
        axes.barh([row] * len(times), [1] * len(times), left=[at - end for at in times])
    axes.set_yticks(range(len(found)), [name for name, _, _ in found], fontsize=7)


def plot_heatmap(axes: Any, panel: dict[str, Any], found: list[Series], end: float) -> None:
    """A row for each series, in the order of their names as numbers; cumulative ones of a histogram are split up."""
    found = sorted(found, key=lambda one: float(one[0]))
    grid = sorted({at for _, times, _ in found for at in times})
    rows = [[dict(zip(times, ys, strict=True)).get(at, 0.0) for at in grid] for _, times, ys in found]
    if panel["targets"][0].get("format") == "heatmap":
        lower = [[0.0] * len(grid), *rows]
        rows = [
            [high - low for high, low in zip(row, below, strict=True)] for row, below in zip(rows, lower, strict=False)
        ]
    if grid:
        axes.pcolormesh([at - end for at in grid], range(len(rows)), rows, cmap="Oranges", shading="nearest")
        axes.set_yticks(range(len(rows)), [name for name, _, _ in found], fontsize=7)


_PLOTS = {"stat": plot_numbers, "table": plot_numbers, "state-timeline": plot_timeline, "heatmap": plot_heatmap}


if __name__ == "__main__":
    draw(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]) if len(sys.argv) > 3 else 300.0)
