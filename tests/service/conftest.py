"""Settings of the property tests: no time limit an example, for machines that are busy."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("service", deadline=None)
settings.load_profile("service")
