"""What the chart repeats of other files: the settings of the server in its schema, the dashboard and the rules.

python helm/generate.py            # write them
python helm/generate.py --check    # exit code 1, and the names of those that are not current
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from opticnerve_server.config import Config
from opticnerve_server.settings import json_schema, settings_of

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "helm/opticnerve"
SCHEMA = CHART / "values.schema.json"

OF_THE_CHART = {
    "model", "listen", "health_listen", "metrics_listen", "advertise",
    "tls_cert", "tls_key", "tls_client_ca", "auth_token_file",
}  # fmt: skip
"""Settings that follow from other values, and are given as flags."""

COPIES = {
    CHART / "files/opticnerve.json": ROOT / "deploy/grafana/opticnerve.json",
    CHART / "files/rules.yaml": ROOT / "deploy/prometheus/rules.yaml",
    CHART / "files/alerts.yaml": ROOT / "deploy/prometheus/alerts.yaml",
}
"""By file of the chart, which is packed without the rest of this repository: its source."""


def server_schema() -> dict[str, object]:
    """The schema of the values under `server`: every setting by its file key, but those of the chart.

    The three durations must be there, since probes and grace periods are computed from them.
    """
    properties = {
        name: {"description": declared.help, **json_schema(declared.parse)}
        for name, declared in settings_of(Config).items()
        if name not in OF_THE_CHART
    }
    needed = ["startup_timeout", "drain_delay", "grace"]
    return {"type": "object", "additionalProperties": False, "required": needed, "properties": properties}


def generated() -> dict[Path, str]:
    """Every generated file with the text that it should have."""
    schema = json.loads(SCHEMA.read_text())
    schema["properties"]["server"] = server_schema()
    return {
        SCHEMA: json.dumps(schema, indent=2) + "\n",
        **{copy: source.read_text() for copy, source in COPIES.items()},
    }


def main() -> int:
    check = "--check" in sys.argv[1:]
    stale = {path: text for path, text in generated().items() if not path.exists() or path.read_text() != text}
    for path, text in stale.items():
        print(f"{path.relative_to(ROOT)} is {'not current: run make chart' if check else 'written'}")
        if not check:
            path.write_text(text)
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
