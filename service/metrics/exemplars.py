"""Exemplars of a histogram: of each bucket one request whose trace can be looked at, shown in OpenMetrics' format.

They are kept beside the histogram, and not in it: the files in which several processes count have no place for them.
So a scrape shows those of the worker that answers it.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence

from prometheus_client import Metric
from prometheus_client.samples import Exemplar


class Exemplars:
    """The newest exemplar of each bucket, of each endpoint.

    Args:
        name: of the histogram; `endpoint` is its only label.
        buckets: its upper bounds, in seconds, but the infinite one.
        wall_clock: seconds since 1970.
    """

    def __init__(self, name: str, buckets: Sequence[float], wall_clock: Callable[[], float] = time.time) -> None:
        self._name = name
        self._bounds = (*buckets, math.inf)
        self._wall_clock = wall_clock
        self._newest: dict[tuple[str, float], Exemplar] = {}

    def remember(self, endpoint: str, seconds: float, labels: dict[str, str]) -> None:
        """Let a request that was observed a moment ago stand for its bucket."""
        bound = self._bounds[bisect_left(self._bounds, seconds)]
        self._newest[endpoint, bound] = Exemplar(labels, seconds, self._wall_clock())

    def add_to(self, metric: Metric) -> Metric:
        """Return the metric, with exemplars if it is this histogram."""
        if metric.name == self._name:
            metric.samples = [
                sample._replace(exemplar=self._newest.get((sample.labels["endpoint"], float(sample.labels["le"]))))
                if "le" in sample.labels
                else sample
                for sample in metric.samples
            ]
        return metric
