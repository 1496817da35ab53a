"""The methods of both clients; each is written once as a function that builds a request."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from functools import wraps
from types import MethodType
from typing import Any, Concatenate, Generic, ParamSpec, Unpack, overload

from vitserve import requests
from vitserve.documents import (
    AttentionDocument,
    BatchClassification,
    Classification,
    Classifications,
    Labels,
    ListedModel,
    ModelDescription,
    Pooling,
)
from vitserve.head_documents import AddedExamples, HeadDescription
from vitserve.pictures import ImageSource
from vitserve.requests import (
    Answer,
    Array,
    DrawingOptions,
    MapOptions,
    Request,
    WithAttention,
)

_Arguments = ParamSpec("_Arguments")


class Method(Generic[_Arguments, Answer]):
    """A method of both clients, made from the function that builds its request.

    If the function returns `Request[T]`, the method of `Client` returns a T, and the method of
    `AsyncClient` is awaited for a T.
    """

    def __init__(self, build: Callable[Concatenate[Any, _Arguments], Request[Answer]]) -> None:
        self._build = build

    @overload
    def __get__(
        self, client: BlockingMethods | None, kind: type[BlockingMethods]
    ) -> Callable[_Arguments, Answer]: ...

    @overload
    def __get__(
        self, client: AsyncMethods | None, kind: type[AsyncMethods]
    ) -> Callable[_Arguments, Coroutine[Any, Any, Answer]]: ...

    def __get__(self, client: Methods | None, kind: type[Methods]) -> Callable[..., Any]:
        function = wraps(self._build)(kind._sender(self._build))
        return function if client is None else MethodType(function, client)


class Methods:
    """The methods of both clients."""

    @staticmethod
    def _sender(build: Callable[..., Request[Any]]) -> Callable[..., Any]:
        """Return the method that sends the request that `build` returns."""
        raise NotImplementedError

    @Method
    def classify(
        self,
        image: ImageSource,
        *,
        top_k: int | None = None,
        attention: WithAttention = False,
        embedding: bool | None = None,
        labels: Sequence[str] | None = None,
        model: str | None = None,
        min_score: float | None = None,
    ) -> Request[Classification]:
        """Classify one image.

        Args:
            image: the picture, see `ImageSource`.
            top_k: number of classes in the answer.
            attention: the method of a map to add, or True for the service's default.
            embedding: whether to add the features that the classifier reads.
            labels: classes for a model with a text tower, instead of its own.
            model: one of the names that `models` lists, by default the service's default.
            min_score: least score of a class in the answer.
        """
        if model is not None and (not isinstance(model, str) or model == "*" or "," in model):
            raise ValueError(f"model {model!r} is not one name: call classify_by for several")
        query = requests.query(
            top_k=top_k,
            attention=attention,
            embedding=embedding,
            labels=labels,
            model=model,
            min_score=min_score,
        )
        return Request(
            "POST", "/classify", Classification.model_validate_json, requests.body(image) | query
        )

    @Method
    def classify_by(
        self,
        image: ImageSource,
        models: Sequence[str] = ("*",),
        *,
        top_k: int | None = None,
        attention: WithAttention = False,
        min_score: float | None = None,
    ) -> Request[Classifications]:
        """Classify one image by several models, by default by all.

        Each model has an answer or an error.
        """
        names = [models] if isinstance(models, str) else [str(name) for name in models]
        if not names:
            raise ValueError("models is empty: name some, or leave it out for all")
        if len(names) == 1 and names != ["*"]:
            names *= 2  # for a single name the service answers with another document
        query = requests.query(
            top_k=top_k, attention=attention, model=",".join(names), min_score=min_score
        )
        return Request(
            "POST", "/classify", Classifications.model_validate_json, requests.body(image) | query
        )

    @Method
    def classify_batch(
        self,
        images: Sequence[ImageSource],
        *,
        top_k: int | None = None,
        attention: WithAttention = False,
        labels: Sequence[str] | None = None,
        model: str | None = None,
    ) -> Request[BatchClassification]:
        """Classify several images; the results, each an answer or an error, keep their order."""
        query = requests.query(top_k=top_k, attention=attention, labels=labels, model=model)
        return Request(
            "POST",
            "/classify/batch",
            BatchClassification.model_validate_json,
            requests.form(images) | query,
        )

    @Method
    def embed(
        self,
        image: ImageSource,
        *,
        pool: Pooling | None = None,
        normalize: bool | None = None,
        model: str | None = None,
    ) -> Request[Array]:
        """Return the embedding of one image, float32 [D]."""
        query = requests.query(pool=pool, normalize=normalize, model=model, format="npy")
        return Request("POST", "/embed", requests.array, requests.body(image) | query)

    @Method
    def embed_batch(
        self,
        images: Sequence[ImageSource],
        *,
        pool: Pooling | None = None,
        normalize: bool | None = None,
        model: str | None = None,
    ) -> Request[Array]:
        """Return the embeddings of several images, float32 [N, D].

        If one image cannot be read, the whole request fails.
        """
        query = requests.query(pool=pool, normalize=normalize, model=model, format="npy")
        return Request("POST", "/embed/batch", requests.array, requests.form(images) | query)

    @Method
    def embed_texts(
        self, texts: Sequence[str], *, normalize: bool | None = None, model: str | None = None
    ) -> Request[Array]:
        """Return the features of texts from a model with a text tower, float32 [N, D]."""
        query = requests.query(text=texts, normalize=normalize, model=model, format="npy")
        return Request("POST", "/embed", requests.array, query)

    @Method
    def attention(
        self, image: ImageSource | Classification, **options: Unpack[MapOptions]
    ) -> Request[list[AttentionDocument]]:
        """Return the map of each requested class, by default of the best one, with its facts.

        For a `Classification` the service uses the picture that it kept.
        """
        return requests.map_of(image, requests.documents, **options, format="json")

    @Method
    def attention_array(
        self, image: ImageSource | Classification, **options: Unpack[MapOptions]
    ) -> Request[Array]:
        """Return a map as float32 [rows, columns], or [maps, rows, columns] for several classes."""
        return requests.map_of(image, requests.array, **options, format="npy")

    @Method
    def heat_map(
        self, image: ImageSource | Classification, **options: Unpack[DrawingOptions]
    ) -> Request[bytes]:
        """Return a map drawn as PNG."""
        return requests.map_of(image, requests.png, **options, format="png")

    @Method
    def model(self, name: str | None = None) -> Request[ModelDescription]:
        """Describe a served model, by default the service's default."""
        return Request(
            "GET", "/model", ModelDescription.model_validate_json, requests.query(model=name)
        )

    @Method
    def models(self) -> Request[list[ListedModel]]:
        """List the models of the service by name."""
        return Request("GET", "/models", requests.MODELS.validate_json)

    @Method
    def labels(self, model: str | None = None) -> Request[list[str]]:
        """List the classes of a model, in index order."""

        def parse(content: bytes) -> list[str]:
            return Labels.model_validate_json(content).labels

        return Request("GET", "/labels", parse, requests.query(model=model))

    @Method
    def teach(
        self,
        head: str,
        label: str,
        image: ImageSource | Classification,
        *,
        backbone: str | None = None,
    ) -> Request[AddedExamples]:
        """Add an image to the examples of a head.

        The answer has the example's number, and the number of examples of each label. For a
        `Classification` the service uses the picture that it kept. The first example creates the
        head, on the features of the model `backbone`.
        """
        if not isinstance(label, str):
            raise TypeError(f"label {label!r}: expected one text, because a picture has one label")
        path = f"{requests.head_path(head)}/examples"
        query = {"label": label, "backbone": backbone}
        if isinstance(image, Classification):
            options = requests.query(**query, id=requests.kept_id(image))
        else:
            options = requests.body(image) | requests.query(**query)
        return Request("POST", path, AddedExamples.model_validate_json, options)

    @Method
    def head(self, name: str) -> Request[HeadDescription]:
        """Describe a taught head: its examples, its accuracy, and labels that look wrong."""
        return Request("GET", requests.head_path(name), HeadDescription.model_validate_json)


class BlockingMethods(Methods):
    """The methods of a client that sends each request and returns its answer."""


class AsyncMethods(Methods):
    """The methods of a client whose callers await the answers."""
