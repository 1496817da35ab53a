"""The pictures and answers of a stream of requests; see `vitserve.client.Client.stream`."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from vitserve.errors import ClientError
from vitserve.requests import Answer

Source = TypeVar("Source")


def pictures_of(images: Iterable[Source], concurrency: int) -> Iterator[Source]:
    """Return the images of a stream; raises `TypeError` or `ValueError` for wrong arguments."""
    if isinstance(images, str | bytes):
        raise TypeError("expected a list of pictures, not one")
    if concurrency < 1:
        raise ValueError(f"concurrency {concurrency}: expected at least 1")
    return iter(images)


def answer_or_error(result: Callable[[], Answer]) -> Answer | ClientError | OSError:
    """Return the result, or the error that it raises if the error concerns only one image."""
    try:
        return result()
    except (ClientError, OSError) as error:
        return error
