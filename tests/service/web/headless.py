"""A service whose model has no classification head."""

from typing import Final

from service.settings import load_settings
from tests.service.fakes import model_info
from tests.service.web.apps import App
from tests.service.web.fake_engine import FakeEngine

REFUSAL: Final = (
    "the model has no classification head: it gives embeddings (POST /embed, vitserve embed) "
    "and attention maps"
)


def headless() -> App:
    info = model_info()
    info = model_info(labels=(), config=info.config.model_copy(update={"num_classes": 0}))
    return App(load_settings(), engine=FakeEngine(info))
