"""The compose files, Prometheus' configuration and its rules agree with the service."""

import json
import re
import shutil
import subprocess
from typing import Any

import pytest

from service.settings import ENV_PREFIX, Settings, settings_class
from tests.conftest import REPOSITORY
from tests.strict_yaml import load_document, load_documents
from tests.support.docker_compose import docker_compose

BASE = load_document(REPOSITORY / "docker-compose.yml")
GPU = load_document(REPOSITORY / "docker-compose.override.yml")
CPU = load_document(REPOSITORY / "docker-compose.cpu.yml")


def default(value: str) -> str:
    """Return the value of `${NAME:-default}` without NAME."""
    return re.sub(r"\$\{\w+:?-([^}]*)\}", r"\1", value)


def image_environment() -> dict[str, str]:
    instruction = re.search(
        r"^ENV ((?:.*\\\n)*.*)$", (REPOSITORY / "Dockerfile").read_text().split("\nFROM ")[-1], re.M
    )
    assert instruction
    return dict(pair.split("=", 1) for pair in instruction[1].replace("\\\n", " ").split())


def devices(*files: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the reserved GPUs; Compose joins the lists of all files."""
    found: list[dict[str, Any]] = []
    for file in files:
        resources = file["services"]["vitserve"].get("deploy", {}).get("resources", {})
        found += resources.get("reservations", {}).get("devices", [])
    return found


def test_compose_passes_every_setting():
    settings = {f"{ENV_PREFIX}{name.upper()}" for name in settings_class().model_fields}
    # Fixed in the container, because the published port relies on them. Users choose the host's
    # port.
    fixed = {"VIT_HOST", "VIT_PORT"}

    passed = BASE["services"]["vitserve"]["environment"]
    assert {name for name in passed if name.startswith(ENV_PREFIX)} == settings - fixed
    assert "FORWARDED_ALLOW_IPS" in passed
    assert image_environment()["VIT_HOST"] == "0.0.0.0"
    assert "VIT_PORT" not in image_environment()  # it would hide PORT of a hosting platform
    assert default(BASE["services"]["vitserve"]["ports"][0]) == "127.0.0.1:8000:8000"


def test_only_plain_compose_reserves_gpu():
    (gpu,) = devices(BASE, GPU)

    assert gpu["driver"] == "nvidia"
    assert "gpu" in gpu["capabilities"]
    assert devices(BASE, CPU) == []


def test_docker_waits_longer_than_the_drain():
    seconds = re.fullmatch(r"(\d+)s", default(BASE["services"]["vitserve"]["stop_grace_period"]))

    assert seconds
    assert int(seconds[1]) > Settings.model_fields["drain_timeout"].default


def test_systemd_gives_a_drain_its_time():
    unit = (REPOSITORY / "deploy/systemd/vitserve.service").read_text()
    (seconds,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.M)

    assert int(seconds) > Settings.model_fields["drain_timeout"].default


def test_systemd_bounds_the_service():
    text = (REPOSITORY / "deploy/systemd/vitserve.service").read_text()
    unit = dict(
        line.split("=", 1) for line in text.splitlines() if "=" in line and not line.startswith("#")
    )

    assert bytes_of(unit["MemoryMax"]) == bytes_of(
        default(BASE["services"]["vitserve"]["mem_limit"])
    )
    assert unit["CapabilityBoundingSet"] == ""
    assert unit["SystemCallFilter"].split()[0] == "@system-service"
    assert f"/var/lib/{unit['StateDirectory']}/" in text


def documented_memory() -> list[tuple[str, int]]:
    """Return the parts of memory in docs/reliability.md, with their default bounds in bytes."""
    text = (
        (REPOSITORY / "docs/reliability.md")
        .read_text()
        .partition("\n## Memory\n")[2]
        .partition("\n### ")[0]
    )
    rows = [
        [cell.strip(" *") for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line[:2] == "| "
    ]
    return [
        (row[0], bytes_of(re.sub(r"\(.*\)", "", row[2]).rpartition("=")[2])) for row in rows[1:]
    ]


def bytes_of(text: str) -> int:
    """Return the bytes of `7g`, `128m`, `7Gi` or `1.5 GiB`."""
    found = re.fullmatch(r"([\d.]+) ?(?:([kmg])(?:i?b?)?)?", text.strip(), re.IGNORECASE)
    assert found, text
    return round(float(found[1]) * (1 << 10 * " kmg".index((found[2] or " ").lower())))


def test_limits_cover_the_documented_memory():
    *rows, (name, total) = documented_memory()
    assert name == "sum"
    assert sum(size for _, size in rows) == pytest.approx(total, abs=0.05 * 2**30)
    service = BASE["services"]["vitserve"]
    [deployment] = load_documents(REPOSITORY / "deploy/kubernetes/base/deployment.yaml")
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    assert bytes_of(default(service["mem_limit"])) >= total
    assert bytes_of(container["resources"]["limits"]["memory"]) >= total
    assert bytes_of(default(GPU["services"]["vitserve"]["mem_limit"])) >= total


def test_container_bounds_its_resources():
    service = BASE["services"]["vitserve"]
    assert int(default(str(service["pids_limit"]))) >= 256
    [temporary] = service["tmpfs"]
    place, _, size = temporary.partition(":size=")
    assert place == "/tmp"
    assert bytes_of(size) == next(size for name, size in documented_memory() if "`/tmp`" in name)


def test_caches_are_in_the_volume():
    environment = image_environment()
    (target,) = [
        mount.split(":")[1]
        for mount in BASE["services"]["vitserve"]["volumes"]
        if mount.startswith("cache:")
    ]

    for name in ("VIT_CACHE_DIR", "HF_HOME", "TMPDIR"):
        assert environment[name].startswith(f"{target}/")
    passed = BASE["services"]["vitserve"]["environment"]
    unset = [name for name, value in passed.items() if value is None and name in environment]
    assert unset == [], (
        "compose unsets what the image sets if a name is passed through without a value"
    )
    assert default(passed["VIT_CACHE_DIR"]) == environment["VIT_CACHE_DIR"]


def test_kernels_are_below_the_cache_folder():
    unit = (REPOSITORY / "deploy/systemd/vitserve.service").read_text()
    manifests = "".join(
        path.read_text() for path in (REPOSITORY / "deploy/kubernetes").rglob("*.yaml")
    )

    kernels = r"TORCHINDUCTOR_CACHE_DIR|TRITON_CACHE_DIR|CUDA_CACHE_PATH"
    assert not re.search(kernels, unit + manifests + " ".join(image_environment()))
    assert "VIT_CACHE_DIR=/var/cache/vitserve " in unit


def test_prometheus_scrapes_the_service_port():
    config = load_document(REPOSITORY / "deploy/prometheus/prometheus.yml")
    (job,) = config["scrape_configs"]
    (static,) = job["static_configs"]
    host, port = static["targets"][0].split(":")

    assert host in BASE["services"]
    assert f"\nEXPOSE {port}\n" in (REPOSITORY / "Dockerfile").read_text()
    assert job.get("metrics_path", "/metrics") == "/metrics"


def test_prometheus_finds_its_rules() -> None:
    (pattern,) = load_document(REPOSITORY / "deploy/prometheus/prometheus.yml")["rule_files"]
    assert {*RULES.parent.glob(pattern)} == {*RULES.iterdir()}
    assert (
        "./deploy/prometheus/rules:/etc/prometheus/rules:ro"
        in BASE["services"]["prometheus"]["volumes"]
    )


@pytest.mark.parametrize(
    ("files", "reserved", "device"),
    [
        ([], [{"driver": "nvidia", "count": -1, "capabilities": ["gpu"]}], "cuda"),
        (["docker-compose.yml"], [], None),
        (["docker-compose.yml", "docker-compose.cpu.yml"], [], "cpu"),
    ],
    ids=["plain up", "base", "base and cpu"],
)
def test_compose_accepts_its_files(files, reserved, device):
    named = [argument for file in files for argument in ("-f", file)]

    done = docker_compose(*named, "--profile", "*", "config", "--format", "json")

    assert done.returncode == 0, done.stderr
    assert "level=warning" not in done.stderr
    config = json.loads(done.stdout)
    assert config["services"].keys() == BASE["services"].keys()
    assert devices(config) == reserved  # a count of -1 is `all`
    assert config["services"]["vitserve"]["environment"]["VIT_DEVICE"] == device


def test_compose_builds_only_with_override():
    taken = json.loads(
        docker_compose("config", "--format", "json", VITSERVE_IMAGE="registry.example.org/v").stdout
    )
    files = ["-f", "docker-compose.yml", "-f", "docker-compose.build.yml"]
    unnamed = docker_compose(*files, "config")
    built = docker_compose(
        *files, "config", "--format", "json", VARIANT="cuda12", TORCH_INDEX_URL=""
    )

    assert taken["services"]["vitserve"]["image"] == "registry.example.org/v:cuda"
    assert "build" not in taken["services"]["vitserve"]
    assert unnamed.returncode != 0
    assert "give cpu, cuda or cuda12" in unnamed.stderr
    service = json.loads(built.stdout)["services"]["vitserve"]
    assert service["image"] == "vitserve:cuda12"
    given = {name: value for name, value in service["build"]["args"].items() if value is not None}
    assert given == {"VARIANT": "cuda12", "TORCH_INDEX_URL": ""}


RULES = REPOSITORY / "deploy/prometheus/rules"
TESTS = REPOSITORY / "tests/deploy/prometheus/alerts.test.yml"
(ALERT_FILE,) = load_documents(RULES / "alerts.yml")
ALERTS: list[dict[str, Any]] = [rule for group in ALERT_FILE["groups"] for rule in group["rules"]]


@pytest.mark.timeout(120)  # promtool computes for six seconds
@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "config", REPOSITORY / "deploy/prometheus/prometheus.yml"],
        ["test", "rules", TESTS],
    ],
    ids=["configuration and rules", "tests"],
)
def test_promtool_accepts_configuration(arguments: list[str]) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (it comes with Prometheus)")
    done = subprocess.run([promtool, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_both_cases() -> None:
    (document,) = load_documents(TESTS)
    cases = [case for test in document["tests"] for case in test.get("alert_rule_test", ())]
    for alert in ALERTS:
        expected = [
            bool(case["exp_alerts"]) for case in cases if case["alertname"] == alert["alert"]
        ]
        assert True in expected, alert["alert"]
        assert False in expected, alert["alert"]


def test_docs_explain_each_alert() -> None:
    section = (
        (REPOSITORY / "docs/metrics.md").read_text().split("\n## Alerts\n")[1].split("\n## ")[0]
    )
    assert sorted(re.findall(r"`(Vitserve\w+)`", section)) == sorted(
        alert["alert"] for alert in ALERTS
    )
    for alert in ALERTS:
        assert alert["annotations"]["runbook"] == "docs/metrics.md#alerts"
        assert alert["labels"]["severity"] in {"page", "ticket"}
