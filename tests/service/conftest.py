"""Settings of the property tests: no time limit an example, for machines that are busy."""

import pytest
from hypothesis import settings

from tests.service.web.apps import App, app

settings.register_profile("service", deadline=None)
settings.load_profile("service")


@pytest.fixture
def service() -> App:
    """The application as it is without settings."""
    return app()
