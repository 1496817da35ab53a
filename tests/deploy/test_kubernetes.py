"""The Kubernetes manifests: built by kustomize, valid for schemas, consistent with the service."""

import json
import re
import shutil
import subprocess
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from service.settings import ENV_PREFIX, load_settings, settings_class
from tests.conftest import REPOSITORY
from tests.strict_yaml import load_documents
from tests.support.docker_compose import docker_compose

KUBERNETES = REPOSITORY / "deploy/kubernetes"
OVERLAYS = sorted(folder.name for folder in (KUBERNETES / "overlays").iterdir())
COMPONENTS = sorted(folder.name for folder in (KUBERNETES / "components").iterdir())
CHECKPOINTS = [name for name in COMPONENTS if name.startswith("checkpoint-")]
SCALERS = ["hpa", "keda"]
TOGETHER = sorted({*COMPONENTS} - {*CHECKPOINTS, "hpa"})
"""Components of which an overlay has at most one: sources of checkpoints, and scalers."""
CUSTOM = {"ServiceMonitor", "PrometheusRule", "ScaledObject", "InferenceService"}
"""Kinds that are not part of Kubernetes."""
PAGE = (REPOSITORY / "docs/scaling.md").read_text()
(INFERENCE_SERVICE, KSERVE_POLICY) = load_documents(KUBERNETES / "kserve/inferenceservice.yaml")


@lru_cache
def kubectl() -> str:
    """Return a kubectl whose kustomize supports components; Debian 12 has an older one."""
    found = shutil.which("kubectl")
    if found is None:
        pytest.skip("kubectl is not installed")
    done = subprocess.run(
        [found, "version", "--client", "--output=json"], capture_output=True, text=True, check=False
    )
    version = json.loads(done.stdout or "{}").get("kustomizeVersion", "none")
    if not re.match(r"v([5-9]|\d\d)\.", version):
        pytest.skip(f"kubectl has kustomize {version}, and 5 or later is needed")
    return found


@lru_cache
def kustomize(folder: Path) -> list[dict[str, Any]]:
    """Return the manifests that `kubectl apply -k` would send."""
    done = subprocess.run(
        [kubectl(), "kustomize", folder], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return list(yaml.safe_load_all(done.stdout))


def build(overlay: str) -> list[dict[str, Any]]:
    """Return the manifests of an overlay."""
    return kustomize(KUBERNETES / "overlays" / overlay)


def built_with(
    folder: Path, overlay: str, components: list[str], **more: Any
) -> list[dict[str, Any]]:
    """Return the manifests of a new overlay: one of ours, with components."""
    named = [f"../../components/{name}" for name in components]
    return built(
        folder,
        {"namespace": "pictures", "resources": [f"../{overlay}"], "components": named, **more},
    )


def built(folder: Path, kustomization: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the manifests of a new overlay in a copy of ours."""
    shutil.copytree(KUBERNETES, folder, dirs_exist_ok=True)
    own = folder / "overlays" / "own"
    own.mkdir()
    kind = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
    (own / "kustomization.yaml").write_text(yaml.safe_dump(kind | kustomization))
    return kustomize(own)


def one(manifests: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    """Return the service's manifest of a kind, which has the name `vitserve`.

    The name of a ConfigMap ends with a hash.
    """
    [found] = [
        manifest
        for manifest in manifests
        if manifest["kind"] == kind
        and re.fullmatch(r"vitserve(-[a-z0-9]{10})?", manifest["metadata"]["name"])
    ]
    return found


def container(manifests: list[dict[str, Any]]) -> dict[str, Any]:
    [found] = one(manifests, "Deployment")["spec"]["template"]["spec"]["containers"]
    return found  # type: ignore[no-any-return]


def settings_of(manifests: list[dict[str, Any]]) -> dict[str, str]:
    values: dict[str, str] = one(manifests, "ConfigMap")["data"]
    return values


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kubernetes_schemas_accept_manifests(overlay: str, tmp_path: Path) -> None:
    validator = pytest.importorskip("kubernetes_validate")
    known = [item for item in built_with(tmp_path, overlay, TOGETHER) if item["kind"] not in CUSTOM]
    assert len(known) >= 6
    for manifest, version in product(known, ("1.29", "1.37")):
        validator.validate(manifest, version, strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_settings_of_manifests_are_valid(overlay: str) -> None:
    given = settings_of(build(overlay))
    # Variables of libraries, such as OMP_NUM_THREADS, are not settings.
    ours = {name: value for name, value in given.items() if name.startswith(ENV_PREFIX)}
    values = {name.removeprefix(ENV_PREFIX).lower(): value for name, value in ours.items()}
    assert values.keys() <= settings_class().model_fields.keys()
    load_settings(values)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_pod_has_time_to_drain(overlay: str) -> None:
    manifests = build(overlay)
    pod = one(manifests, "Deployment")["spec"]["template"]["spec"]
    command, seconds = container(manifests)["lifecycle"]["preStop"]["exec"]["command"]
    assert command == "sleep"
    drain = float(settings_of(manifests)["VIT_DRAIN_TIMEOUT"])
    assert pod["terminationGracePeriodSeconds"] > float(seconds) + drain
    # Python as process 1 would ignore a SIGTERM that arrives before its handlers are set.
    assert pod["shareProcessNamespace"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_probes_give_models_time_to_load(overlay: str) -> None:
    ours = container(build(overlay))
    assert [
        ours[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")
    ] == [
        "/readyz",
        "/readyz",
        "/healthz",
    ]
    assert ours["startupProbe"]["periodSeconds"] * ours["startupProbe"]["failureThreshold"] >= 900
    [port] = ours["ports"]
    assert {
        ours[f"{kind}Probe"]["httpGet"]["port"] for kind in ("startup", "readiness", "liveness")
    } == {port["name"]}
    assert f"\nEXPOSE {port['containerPort']}\n" in (REPOSITORY / "Dockerfile").read_text()


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_pod_may_do_nothing_but_serve(overlay: str) -> None:
    manifests = build(overlay)
    pod = one(manifests, "Deployment")["spec"]["template"]["spec"]
    ours = container(manifests)
    user = int(re.search(r"^USER (\d+)", (REPOSITORY / "Dockerfile").read_text(), re.M)[1])  # type: ignore[index]
    assert pod["securityContext"]["runAsUser"] == user
    assert pod["securityContext"]["runAsNonRoot"]
    assert not pod["automountServiceAccountToken"]
    context = ours["securityContext"]
    assert context["readOnlyRootFilesystem"]
    assert not context["allowPrivilegeEscalation"]
    assert context["capabilities"] == {"drop": ["ALL"]}
    # Folders that the image writes to.
    assert {mount["mountPath"] for mount in ours["volumeMounts"]} == {"/cache", "/tmp"}


def test_compiled_kernels_outlive_a_pod(tmp_path: Path) -> None:
    pod = one(built_with(tmp_path, "gpu", ["kernel-cache"]), "Deployment")["spec"]["template"][
        "spec"
    ]
    [cache] = [volume for volume in pod["volumes"] if volume["name"] == "cache"]
    assert cache == {"name": "cache", "persistentVolumeClaim": {"claimName": "vitserve-cache"}}


@pytest.mark.parametrize("component", SCALERS)
def test_only_the_scaler_sets_replicas(component: str, tmp_path: Path) -> None:
    alone = one(build("cpu"), "Deployment")
    assert alone["spec"]["replicas"] == 2
    manifests = built_with(tmp_path, "cpu", [component])
    deployment = one(manifests, "Deployment")
    assert "replicas" not in deployment["spec"]
    [scaler] = [
        item for item in manifests if item["kind"] in {"HorizontalPodAutoscaler", "ScaledObject"}
    ]
    assert scaler["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]


@pytest.mark.parametrize(("overlay", "component"), [*product(["cpu", "gpu"], CHECKPOINTS)])
def test_checkpoint_is_at_documented_path(overlay: str, component: str, tmp_path: Path) -> None:
    [path] = re.findall(rf"^\| `{component}` \|.*\| `(.*)` \|$", PAGE, re.M)
    setting = {"name": "vitserve", "behavior": "merge", "literals": [f"VIT_CHECKPOINT={path}"]}
    image = {"name": "vitserve-checkpoint", "newName": "example.org/my-vit", "newTag": "1"}
    manifests = built_with(
        tmp_path, overlay, [component], configMapGenerator=[setting], images=[image]
    )
    assert settings_of(manifests)["VIT_CHECKPOINT"] == path
    pod = one(manifests, "Deployment")["spec"]["template"]["spec"]
    ours = container(manifests)
    [mount] = [mount for mount in ours["volumeMounts"] if mount["name"] == "checkpoints"]
    assert mount["readOnly"]
    # A relative path begins in the image's working folder.
    [folder] = re.findall(
        r"^WORKDIR (.*)$", (REPOSITORY / "Dockerfile").read_text().split("\nFROM ")[-1], re.M
    )
    assert Path(folder, path).is_relative_to(mount["mountPath"])
    [volume] = [volume for volume in pod["volumes"] if volume["name"] == "checkpoints"]
    assert {*volume} - {"name"} == {
        {"pvc": "persistentVolumeClaim", "image": "image", "init": "emptyDir"}[component[11:]]
    }
    for init in pod.get("initContainers", []):
        assert init["image"] == "example.org/my-vit:1"
        assert init["command"][-1] == mount["mountPath"] == init["volumeMounts"][0]["mountPath"]
        for key in ("allowPrivilegeEscalation", "readOnlyRootFilesystem", "capabilities"):
            assert init["securityContext"][key] == ours["securityContext"][key]
    validator = pytest.importorskip("kubernetes_validate")
    for version in (
        ["1.33", "1.37"] if component == "checkpoint-image" else ["1.29", "1.33", "1.37"]
    ):
        validator.validate(one(manifests, "Deployment"), version, strict=True)


@pytest.mark.parametrize("component", ["checkpoint-init", "checkpoint-image"])
def test_documented_overlay_builds(component: str, tmp_path: Path) -> None:
    overlay, patch = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.M | re.S)
    text = overlay.replace("checkpoint-init", component) + (
        patch if component == "checkpoint-image" else ""
    )
    manifests = built(tmp_path, yaml.safe_load(text))
    pod = one(manifests, "Deployment")["spec"]["template"]["spec"]
    [volume] = [volume for volume in pod["volumes"] if volume["name"] == "checkpoints"]
    images = [init["image"] for init in pod.get("initContainers", [])] or [
        volume["image"]["reference"]
    ]
    assert images == ["registry.example.org/my-vit:1"]
    assert container(manifests)["image"] == "registry.example.org/vitserve:0.1.0-cpu"


def test_components_open_their_network(tmp_path: Path) -> None:
    def ports(components: list[str]) -> set[int]:
        manifests = built_with(tmp_path / "-".join(["with", *components]), "cpu", components)
        policies = [item["spec"] for item in manifests if item["kind"] == "NetworkPolicy"]
        return {
            port["port"]
            for policy in policies
            for rule in policy["egress"]
            for port in rule["ports"]
        }

    assert ports([]) == {53}
    assert ports(["hub"]) == {53, 443}
    assert ports(["otlp"]) == {53, 4318}
    settings = settings_of(built_with(tmp_path / "otlp", "cpu", ["otlp"]))
    assert urlsplit(settings["OTEL_EXPORTER_OTLP_ENDPOINT"]).port == 4318


def test_kserve_pods_have_a_network_policy() -> None:
    ours = one(build("cpu"), "NetworkPolicy")
    [port] = INFERENCE_SERVICE["spec"]["predictor"]["containers"][0]["ports"]
    [of_any] = ours["spec"]["ingress"]
    expected = {
        **ours["spec"],
        "podSelector": {
            "matchLabels": {
                "serving.kserve.io/inferenceservice": INFERENCE_SERVICE["metadata"]["name"]
            }
        },
        "ingress": [{**of_any, "ports": [{"port": port["containerPort"], "protocol": "TCP"}]}],
    }
    assert KSERVE_POLICY["spec"] == expected
    pytest.importorskip("kubernetes_validate").validate(KSERVE_POLICY, "1.33", strict=True)


def test_operator_has_the_prometheus_rules(tmp_path: Path) -> None:
    rule = one(built_with(tmp_path, "cpu", ["monitoring"]), "PrometheusRule")
    files = sorted((REPOSITORY / "deploy/prometheus/rules").glob("*.yml"))
    assert rule["spec"]["groups"] == [
        group for file in files for group in load_documents(file)[0]["groups"]
    ], "make rules"


def test_only_gpu_overlay_requests_a_gpu() -> None:
    limits = {overlay: container(build(overlay))["resources"]["limits"] for overlay in OVERLAYS}
    assert limits["gpu"]["nvidia.com/gpu"] == "1"
    assert "nvidia.com/gpu" not in limits["cpu"]
    assert settings_of(build("gpu"))["VIT_DEVICE"] == "cuda"


def test_redis_overlay_lets_pods_reach_redis() -> None:
    manifests = build("redis")
    names = {(manifest["kind"], manifest["metadata"]["name"]): manifest for manifest in manifests}
    address = urlsplit(settings_of(manifests)["VIT_RECENT_URL"])
    service = names["Service", address.hostname or ""]
    [port] = service["spec"]["ports"]
    assert port["port"] == address.port
    labels = names["Deployment", "vitserve-redis"]["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    [_, to_redis] = one(manifests, "NetworkPolicy")["spec"]["egress"]
    assert to_redis["to"][0]["podSelector"]["matchLabels"].items() <= labels.items()
    assert to_redis["ports"][0]["port"] == port["port"]
    [from_us] = names["NetworkPolicy", "vitserve-redis"]["spec"]["ingress"]
    ours = one(manifests, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert from_us["from"][0]["podSelector"]["matchLabels"].items() <= ours.items()


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
def test_compose_publishes_the_service_port(
    variables: dict[str, str], ports: list[tuple[str, str, int]]
) -> None:
    done = docker_compose("-f", "docker-compose.yml", "config", "--format=json", **variables)
    service = json.loads(done.stdout)["services"]["vitserve"]
    assert [
        (port["host_ip"], port["published"], port["target"]) for port in service["ports"]
    ] == ports
    assert service["environment"].get("VIT_GRPC_PORT") == variables.get("VIT_GRPC_PORT")


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_grpc_component_opens_its_port(overlay: str, tmp_path: Path) -> None:
    validator = pytest.importorskip("kubernetes_validate")
    manifests = built_with(tmp_path, overlay, ["grpc"])
    ports = {port["name"]: port["containerPort"] for port in container(manifests)["ports"]}
    values = settings_of(manifests)
    assert int(values["VIT_GRPC_PORT"]) == ports["grpc"] != ports["http"]
    probe = container(manifests)["readinessProbe"]
    assert (probe["grpc"], "httpGet" in probe) == ({"port": ports["grpc"]}, False)
    service = one(manifests, "Service")
    assert [(port["name"], port["targetPort"]) for port in service["spec"]["ports"]] == [
        ("http",) * 2,
        ("grpc",) * 2,
    ]
    policy = one(manifests, "NetworkPolicy")
    assert [port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]] == [
        "http",
        "grpc",
    ]
    for manifest in (service, policy, one(manifests, "Deployment")):
        validator.validate(manifest, "1.33", strict=True)
