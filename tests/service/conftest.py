"""Settings of property tests: examples have no time limit, for busy machines."""

import pytest
from hypothesis import settings

from tests.service.web.apps import App, app

settings.register_profile("service", deadline=None)
settings.load_profile("service")


@pytest.fixture
def service() -> App:
    """Return the application with default settings."""
    return app()
