"""Puts the metrics of several replicas into one answer, each sample with the label of its replica."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector


def merge(texts: Mapping[str, str]) -> bytes:
    """Return the metrics of all replicas in Prometheus' text format.

    Args:
        texts: of each replica, by its name, what `Metrics.render` returned there.
    """
    registry = CollectorRegistry()
    registry.register(_Merged(texts))
    return generate_latest(registry)


class _Merged(Collector):
    """The samples of all replicas, in one family a metric: a name may be declared only once in an answer."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = texts

    def collect(self) -> Iterator[Metric]:
        """Return all families, the samples of which carry the label `replica`."""
        families: dict[str, Metric] = {}
        for replica, text in self._texts.items():
            for family in text_string_to_metric_families(text):
                merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                merged.samples += [
                    sample._replace(labels={**sample.labels, "replica": replica}) for sample in family.samples
                ]
        yield from families.values()
