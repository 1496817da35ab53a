"""Tests an installed wheel: `env/bin/python -I try_wheel.py VERSION any`.

The environment contains only the wheel and its dependencies. The script requests a classification,
a map, the page, the API's documentation and metrics. The wheel for `any` platform has no compiled
resize.
"""

import re
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

from model.images.resample import is_compiled
from vitserve.client import Client

SHARED = Path(sys.prefix, "share/vitserve")
PAGES = {
    "/": b"<html",
    "/docs": b"swagger",
    "/openapi.json": b"/classify",
    "/metrics": b"vit_requests_total",
}


def try_service(address: str) -> None:
    """Send requests to a service with the bundled model.

    Raises:
        AssertionError: an answer is wrong.
    """
    picture = SHARED / "examples/dog.jpg"
    with Client(address) as client:
        best = client.classify(picture).predictions[0]
        assert best.label == "dog", best
        assert client.heat_map(picture).startswith(b"\x89PNG")
    for path, content in PAGES.items():
        with urllib.request.urlopen(address + path) as answer:
            assert content in answer.read().lower(), path
    print(f"{address}: {best}")  # noqa: T201


def main() -> None:
    """Try the environment of the Python that runs this."""
    vitserve = str(Path(sys.prefix, "bin/vitserve"))
    version = subprocess.run(
        [vitserve, "--version"], capture_output=True, text=True, check=True
    ).stdout
    assert version.split() == ["vitserve", sys.argv[1]], version
    assert is_compiled() == (sys.argv[2] != "any"), "the compiled resize"
    for name in (
        "grafana/vitserve.json",
        "prometheus/prometheus.yml",
        "prometheus/rules/alerts.yml",
    ):
        assert (SHARED / name).is_file(), name
    with tempfile.TemporaryDirectory() as folder:
        command = [vitserve, "serve", "--port", "0", "--cache-dir", folder]
        service = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True)
        assert service.stderr is not None
        addresses = (re.search(r"ready: (http://[\d.:]+)", line) for line in service.stderr)
        try:
            try_service(next(found[1] for found in addresses if found))
        finally:
            service.terminate()
            service.stderr.read()
        assert service.wait(60) == 0, "the exit code of a stop"


if __name__ == "__main__":
    main()
