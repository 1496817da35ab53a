"""What a panel's queries find, as Grafana asks them: variables and intervals resolved, one value a step."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import httpx
import numpy as np
from numpy.typing import NDArray

Query = Callable[[str, "Window"], list[dict[str, Any]]]
"""Returns the matrix of an expression over a window, as Prometheus' `/api/v1/query_range` answers it."""

_POINTS: Final = 300
"""How many values a line has at most; a panel is about as many points wide."""


@dataclass(frozen=True)
class Window:
    """A range of time.

    Attributes:
        begin, end: seconds since 1970; from one to the other is a multiple of `step`.
        step: seconds between two values.
        scrape_interval: seconds between two scrapes.
    """

    begin: float
    end: float
    step: float
    scrape_interval: float

    @classmethod
    def before(cls, end: float, seconds: float, scrape_interval: float) -> Window:
        """Return the window that ends then, with steps of whole scrape intervals."""
        step = scrape_interval * max(1, math.ceil(seconds / scrape_interval / _POINTS))
        end = math.floor(end / step) * step
        return cls(end - max(1, round(seconds / step)) * step, end, step, scrape_interval)

    @property
    def times(self) -> NDArray[np.float64]:
        """The moment of each value, in seconds since 1970."""
        return np.linspace(self.begin, self.end, round((self.end - self.begin) / self.step) + 1)


@dataclass(frozen=True)
class Series:
    """One line.

    Attributes:
        name: as the legend shows it; empty where the panel shows none.
        labels: of the series.
        values: one for each of the window's times; NaN where there is none.
    """

    name: str
    labels: Mapping[str, str]
    values: NDArray[np.float64]

    @property
    def last(self) -> float:
        """The last value that there is, or NaN."""
        there = self.values[~np.isnan(self.values)]
        return float(there[-1]) if there.size else math.nan


class Prometheus:
    """A Prometheus that is asked over HTTP."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=60)

    def scrape_interval(self) -> float:
        """Return the longest interval of its targets in seconds.

        Raises:
            ValueError: it scrapes nothing.
        """
        targets = self._get("/api/v1/targets", state="active")["activeTargets"]
        return max(_seconds(target["scrapeInterval"]) for target in targets)

    def query(self, expression: str, window: Window) -> list[dict[str, Any]]:
        """Return the matrix of an expression.

        Raises:
            httpx.HTTPStatusError: Prometheus refuses it.
        """
        found: list[dict[str, Any]] = self._get(
            "/api/v1/query_range", query=expression, start=window.begin, end=window.end, step=window.step
        )["result"]
        return found

    def _get(self, path: str, **parameters: str | float) -> dict[str, Any]:
        answer = self._http.get(path, params=parameters)
        answer.raise_for_status()
        data: dict[str, Any] = answer.json()["data"]
        return data


def series_of(panel: Mapping[str, Any], variables: Mapping[str, str], window: Window, query: Query) -> list[Series]:
    """Return what all of a panel's queries find: in their order, and of each query by its labels."""
    found = []
    for target in panel.get("targets", []):
        matrix = query(resolved(target["expr"], variables, window), window)
        for one in sorted(matrix, key=lambda one: sorted(one["metric"].items())):
            values = np.full(window.times.size, np.nan)
            for moment, value in one["values"]:
                values[round((moment - window.begin) / window.step)] = float(value)
            if not np.isnan(values).all():
                found.append(Series(_legend(target["legendFormat"], one["metric"]), one["metric"], values))
    return found


def all_values(dashboard: Mapping[str, Any]) -> dict[str, str]:
    """Return the value of each of a dashboard's variables when all are chosen."""
    return {one["name"]: one["allValue"] for one in dashboard["templating"]["list"] if one.get("includeAll")}


def resolved(expression: str, variables: Mapping[str, str], window: Window) -> str:
    """Return an expression with its variables and intervals filled in.

    Raises:
        ValueError: there is another variable in it.
    """
    # https://grafana.com/docs/grafana/latest/datasources/prometheus/template-variables/
    rate = max(window.step + window.scrape_interval, 4 * window.scrape_interval)
    values = {**variables, "__rate_interval": _duration(rate), "__interval": _duration(window.step)}

    def value(match: re.Match[str]) -> str:
        if match[1] not in values:
            raise ValueError(f"the variable {match[0]} of {expression!r} is unknown")
        return values[match[1]]

    return re.sub(r"\$\{?(\w+)\}?", value, expression)


def _legend(template: str, labels: Mapping[str, str]) -> str:
    """Return the name of a series; `__auto` is of panels with one query, which show a value and no name."""
    if template == "__auto":
        return ""
    return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda match: labels.get(match[1], ""), template)


def _duration(seconds: float) -> str:
    """Return seconds in Prometheus' form, which has no fractions."""
    return f"{seconds:.0f}s" if seconds == round(seconds) else f"{1000 * seconds:.0f}ms"


def _seconds(duration: str) -> float:
    """Return Prometheus' form of a duration, such as `1m30s`, in seconds."""
    units = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
    return sum(float(number) * units[unit] for number, unit in re.findall(r"(\d+)(ms|s|m|h)", duration))
