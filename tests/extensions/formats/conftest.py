from tests.extensions.hub.conftest import hub, load

__all__ = ["hub", "load"]
