from tests.model.conftest import _one_thread, cifar, data, recipe
from tests.service.cli.conftest import quick_start
from tests.service.conftest import service

__all__ = ["_one_thread", "cifar", "data", "quick_start", "recipe", "service"]
