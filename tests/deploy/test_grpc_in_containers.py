"""gRPC in containers: one switch publishes its port in compose, and one component in Kubernetes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from service.settings import Settings
from tests.deploy.test_compose import docker_compose
from tests.deploy.test_kubernetes import OVERLAYS, built_with, container, one, settings_of


@pytest.mark.parametrize(
    ("variables", "ports"),
    [
        ({}, [("127.0.0.1", "8000", 8000)]),
        ({"VIT_PORT": "9000"}, [("127.0.0.1", "9000", 8000)]),
        ({"VIT_GRPC_PORT": "8001"}, [("127.0.0.1", "8000", 8000), ("127.0.0.1", "8001", 8001)]),
        (
            {"VIT_GRPC_PORT": "9001", "VIT_PORT": "9000", "VIT_HOST": "0.0.0.0"},
            [("0.0.0.0", "9000", 8000), ("0.0.0.0", "9001", 9001)],
        ),
    ],
)
def test_compose_publishes_the_port_that_the_service_listens_on(
    variables: dict[str, str], ports: list[tuple[str, str, int]]
) -> None:
    done = docker_compose("-f", "docker-compose.yml", "config", "--format=json", **variables)
    service = json.loads(done.stdout)["services"]["vitserve"]
    assert [(port["host_ip"], port["published"], port["target"]) for port in service["ports"]] == ports
    assert service["environment"].get("VIT_GRPC_PORT") == variables.get("VIT_GRPC_PORT")


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_component_opens_the_port_in_pod_service_and_policy(overlay: str, tmp_path: Path) -> None:
    validator = pytest.importorskip("kubernetes_validate")
    manifests = built_with(tmp_path, overlay, ["grpc"])
    ports = {port["name"]: port["containerPort"] for port in container(manifests)["ports"]}
    values = settings_of(manifests)
    assert Settings(grpc_port=int(values["VIT_GRPC_PORT"])).grpc_port == ports["grpc"] != ports["http"]
    service = one(manifests, "Service")
    assert [(port["name"], port["targetPort"]) for port in service["spec"]["ports"]] == [("http",) * 2, ("grpc",) * 2]
    policy = one(manifests, "NetworkPolicy")
    assert [port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]] == ["http", "grpc"]
    for manifest in (service, policy, one(manifests, "Deployment")):
        validator.validate(manifest, "1.33", strict=True)
