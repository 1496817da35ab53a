"""What a replica of Ray Serve does by itself; tests/e2e/test_ray_serve.py runs it on Ray."""

import asyncio
from typing import Any

import pytest
import yaml
from uvicorn.config import Config
from uvicorn.lifespan.on import LifespanOn

pytest.importorskip("ray.serve", reason="ray[serve] is not installed")

from ray.serve.schema import ServeDeploySchema

from model.errors import CheckpointError
from service.errors import EngineUnavailable, SettingsError
from service.extensions.ray import replicas as ray_serve
from service.extensions.ray.replicas import Arguments, Replica, replica_settings
from service.observe import logs
from service.settings import load_settings
from tests.conftest import REPOSITORY
from tests.service.fakes import FakePredictor, model_info, on_a_loop


@pytest.fixture(autouse=True)
def _process_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "configure", lambda *_: None)
    monkeypatch.setattr(ray_serve, "freeze_objects", lambda: None)
    monkeypatch.setattr(ray_serve, "trim_regularly", lambda: None)


def replica(load: Any) -> tuple[Replica, LifespanOn]:
    """A replica and what begins and ends it, as Ray does."""
    made = Replica(load_settings(), load)
    return made, LifespanOn(Config(made.__serve_build_asgi_app__(), lifespan="on"))


@on_a_loop
async def test_replica_health_follows_its_engine() -> None:
    made, lifespan = replica(lambda *_: (FakePredictor(), model_info()))
    first = asyncio.create_task(made.check_health())
    await asyncio.sleep(0)
    assert not first.done()
    await lifespan.startup()
    await first
    await made.check_health()
    await lifespan.shutdown()
    with pytest.raises(EngineUnavailable, match="the engine is closed"):
        await made.check_health()


@on_a_loop
async def test_a_failed_load_is_unhealthy() -> None:
    def fail(*_: object) -> Any:
        raise CheckpointError("there is no such folder")

    made, lifespan = replica(fail)
    await lifespan.startup()
    with pytest.raises(EngineUnavailable, match="there is no such folder"):
        await made.check_health()
    await lifespan.shutdown()


@pytest.mark.parametrize(
    "settings", [{"workers": 2}, {"device": "all"}, {"device": "cuda:0,cuda:1"}], ids=str
)
def test_replica_refuses_several_processes(settings: dict[str, object]) -> None:
    with pytest.raises(SettingsError, match="a replica has one process and one device"):
        replica_settings(load_settings(settings), Arguments())


@pytest.mark.parametrize("arguments", [{"replica": 2}, {"replicas": 0}, {"cpus": "many"}], ids=str)
def test_unknown_arguments_are_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(SettingsError, match=f"application: {next(iter(arguments))}: "):
        ray_serve.app(arguments)


def test_arguments_may_be_text(caplog: pytest.LogCaptureFixture) -> None:
    ray_serve.app({"replicas": "2", "cpus": "0.5"})
    assert "VIT_RECENT_URL" in caplog.text


def test_the_cluster_file_is_valid() -> None:
    document = yaml.safe_load((REPOSITORY / "deploy/ray/serve.yaml").read_text())
    [application] = ServeDeploySchema.model_validate(document).applications
    assert application.import_path == "service.extensions.ray.replicas:app"
    Arguments.model_validate(application.args)
    settings = {
        name.removeprefix("VIT_").lower(): value
        for name, value in application.runtime_env["env_vars"].items()
    }
    replica_settings(load_settings(settings), Arguments())
