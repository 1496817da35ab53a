"""The pictures and answers of a stream of requests; see `vitserve.client.Client.stream`."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from vitserve.errors import ClientError
from vitserve.pictures import require_several
from vitserve.requests import Answer

Source = TypeVar("Source")


def pictures_of(images: Iterable[Source], concurrency: int) -> Iterator[Source]:
    """Return the images of a stream; raises `TypeError` or `ValueError` for wrong arguments."""
    require_several(images)
    if not isinstance(concurrency, int) or concurrency < 1:
        raise ValueError(f"concurrency {concurrency!r}: expected an integer of at least 1")
    return iter(images)


def answer_or_error(result: Callable[[], Answer]) -> Answer | ClientError | OSError:
    """Return the result, or the error that it raises if the error concerns only one image."""
    try:
        return result()
    except (ClientError, OSError) as error:
        return error
