"""The protocol's probes, and its requests that need the admin key."""

import logging

import pytest

from service.web.path_rules import PathRules
from tests.service.fakes import on_a_loop
from tests.service.web.apps import App, app, inside


@pytest.mark.parametrize(
    ("path", "needed"),
    [
        ("/v2/repository/models/vit/load", True),
        ("/v2/repository/models/vit/unload", True),
        ("/v2/repository/models//load", False),
        ("/v2/repository/models/vit/loads", False),
        ("/v2/repository/index", False),
    ],
)
def test_loading_needs_the_admin_key(path: str, needed: bool) -> None:
    rules: PathRules = inside(app()).state.rules
    assert rules.needs_admin_key("POST", path) is needed


@on_a_loop
async def test_probes_are_not_logged(service: App, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "service.web.middleware")
    for path in ("/v2/health/live", "/v2/health/ready"):
        assert (await service.get(path)).status == 200
    assert caplog.messages == []
