from tests.model.checkpoint.conftest import hub, load

__all__ = ["hub", "load"]
