"""Merges the metrics of several replicas into one answer."""

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import Metric
from prometheus_client.registry import Collector


class MergedMetrics(Collector):
    """The samples of all replicas, merged by family: an answer may declare a name only once.

    Args:
        replicas: results of `Metrics.collect`, by the name of the replica.
    """

    def __init__(self, replicas: Mapping[str, Iterable[Metric]]) -> None:
        self._replicas = replicas

    def collect(self) -> Iterator[Metric]:
        """Yield all families; their samples have the label `replica`."""
        families: dict[str, Metric] = {}
        for replica, metrics in self._replicas.items():
            for family in metrics:
                merged = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                merged.samples += [
                    sample._replace(labels={**sample.labels, "replica": replica})
                    for sample in family.samples
                ]
        yield from families.values()
