"""Errors of taught heads, with the problems that answer them."""

from service.errors import ServiceError, Unavailable


class HeadFull(ServiceError):
    """The number of heads, or of a head's labels or examples, has reached its limit."""

    problem = (409, "head_full")


class HeadWithoutBackbone(ServiceError):
    """The backbone of a head is not served, or differs from the backbone of its examples."""

    problem = (409, "head_without_backbone")


class HeadWithoutExamples(ServiceError):
    """A head has too few examples to be fitted."""

    problem = (409, "head_without_examples")


class HeadsUnavailable(Unavailable):
    """Examples cannot be read or written: the disk is full, or the folder is missing or locked."""

    problem = (503, "heads_unavailable")
    retry_after = 5
