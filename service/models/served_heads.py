"""A head that is served like a model, although it only scores the features of another model."""

from dataclasses import dataclass, field, replace

from model.heads import Head
from model.label_texts import with_labels
from service.engine.messages import ModelInfo
from service.errors import EngineUnavailable, ServiceError
from vitserve.documents import ListedModel


@dataclass(slots=True)
class ServedHead:
    """A head that scores the features of a model.

    Attributes:
        head: the head itself; None before it is fitted.
        key: key in `Models.served` of the model whose features it scores; None if no model has the
            head's backbone.
        reason: why the head does not answer; empty if it does, and while it is being fitted.
        refusal: error of requests to a head that does not answer for this reason.
        removal: how to remove the head, for the refusal of a request that deletes it as a model.
        is_begun: whether the head only lacks examples; it is then `loading`, not `failed`.
    """

    name: str
    head: Head | None
    key: str | None
    reason: str
    refusal: type[ServiceError] = EngineUnavailable
    removal: str = ""
    is_begun: bool = False
    _described: tuple[ModelInfo, ModelInfo] | None = field(
        default=None, init=False, repr=False, compare=False
    )

    def require_key(self, *, models_load: bool) -> str:
        """Return the key of the model whose features the head scores.

        Args:
            models_load: whether a model is loading, which may have the head's backbone.

        Raises:
            EngineUnavailable: the head is being fitted, or its model may be loading.
            `refusal`: the head does not answer.
        """
        if self.key is not None and self.head is not None:
            return self.key
        error = EngineUnavailable if self._is_pending(models_load) else self.refusal
        raise error(f"{self.name}: {self._reason()}")

    def listed(self, model: ListedModel | None, *, models_load: bool) -> ListedModel:
        """Return the head's entry in the list of models, from the entry of the model it scores."""
        if model is not None and self.head is not None:
            differences = {
                "name": self.name,
                "classes": len(self.head.labels),
                "bytes": 0,
                "default": False,
                "taught": True,
            }
            return model.model_copy(update=differences)
        return ListedModel(
            name=self.name,
            state="loading" if self.is_begun or self._is_pending(models_load) else "failed",
            reason=self._reason(),
            backbone="",
            bytes=0,
            default=False,
            taught=True,
        )

    def _is_pending(self, models_load: bool) -> bool:
        return models_load if self.key is None else not self.reason

    def _reason(self) -> str:
        return self.reason or "it is being fitted"

    def info(self, model: ModelInfo) -> ModelInfo:
        """Describe the head as a model, from the description of the model with its backbone.

        The result is kept until the model has another description.
        """
        if self._described is None or self._described[0] is not model:
            self._described = model, self._describe(model)
        return self._described[1]

    def _describe(self, model: ModelInfo) -> ModelInfo:
        head = self.head
        assert head is not None, "only a fitted head answers"
        return replace(
            model,
            name=self.name,
            labels=head.labels,
            config=with_labels(model.config, head.labels),
            temperature=head.temperature,
            is_served_head=True,
            form=head.form,
            multi_label=False,
            zero_shot=None,
            coverage=None,
            calibrated_on=None,
            has_thresholds=False,
            features=head.features,
        )
