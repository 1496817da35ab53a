"""Panels of Grafana in the form that the dashboard uses: lines, a number, a gauge, a histogram over time."""

from __future__ import annotations

from typing import Final, Literal

from grafana_foundation_sdk.builders import bargauge, gauge, heatmap, stat, timeseries
from grafana_foundation_sdk.builders.common import (
    ReduceDataOptions,
    StackingConfig,
    VizLegendOptions,
    VizTooltipOptions,
)
from grafana_foundation_sdk.builders.dashboard import ThresholdsConfig
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.models.common import (
    BigValueTextMode,
    LegendDisplayMode,
    LegendPlacement,
    StackingMode,
    TooltipDisplayMode,
)
from grafana_foundation_sdk.models.dashboard import DataSourceRef, Threshold, ThresholdsMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

SOURCE: Final = DataSourceRef(type_val="prometheus", uid="$source")
"""The data source that the dashboard's variable names."""

Unit = Literal["reqps", "s", "short", "bytes", "percentunit", "watt", "none"]
Limits = tuple[tuple[float | None, str], ...]
"""Colours, each with the value from which it holds; None: from the lowest."""


def lines(
    title: str, unit: Unit, queries: dict[str, str], description: str, *, width: int = 8, stacked: bool = False
) -> timeseries.Panel:
    """Return a panel of lines over time, from legend to query."""
    legend = VizLegendOptions().display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM)
    panel = (
        timeseries.Panel()
        .title(title)
        .description(description)
        .datasource(SOURCE)
        .unit(unit)
        .min(0)
        .span(width)
        .height(8)
        .line_width(1)
        .fill_opacity(30 if stacked else 5)
        .legend(legend.show_legend(True).calcs([]))
        .tooltip(VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
    )
    if stacked:
        panel.stacking(StackingConfig().mode(StackingMode.NORMAL))
    for name, expression in queries.items():
        panel.with_target(_query(expression, name))
    return panel


def number(title: str, unit: Unit, expression: str, description: str, limits: Limits) -> stat.Panel:
    """Return a panel of one number."""
    return (
        stat.Panel()
        .title(title)
        .description(description)
        .datasource(SOURCE)
        .unit(unit)
        .span(4)
        .height(4)
        .thresholds(_thresholds(limits))
        .reduce_options(ReduceDataOptions().calcs(["lastNotNull"]))
        .with_target(_query(expression))
    )


def name(title: str, expression: str, legend: str, description: str) -> stat.Panel:
    """Return a panel that shows the series' names."""
    return (
        stat.Panel()
        .title(title)
        .description(description)
        .datasource(SOURCE)
        .span(4)
        .height(4)
        .text_mode(BigValueTextMode.NAME)
        .with_target(_query(expression, legend))
    )


def dial(title: str, expression: str, description: str, limits: Limits) -> gauge.Panel:
    """Return a panel of one share, from 0 to 1."""
    return (
        gauge.Panel()
        .title(title)
        .description(description)
        .datasource(SOURCE)
        .unit("percentunit")
        .min(0)
        .max(1)
        .span(4)
        .height(4)
        .thresholds(_thresholds(limits))
        .with_target(_query(expression))
    )


def shares(title: str, expression: str, legend: str, description: str, limits: Limits) -> bargauge.Panel:
    """Return a panel of a bar for each series, from 0 to 1."""
    return (
        bargauge.Panel()
        .title(title)
        .description(description)
        .datasource(SOURCE)
        .unit("percentunit")
        .min(0)
        .max(1)
        .span(6)
        .height(8)
        .thresholds(_thresholds(limits))
        .with_target(_query(expression, legend))
    )


def histogram(title: str, unit: Unit, metric: str, labels: str, description: str) -> heatmap.Panel:
    """Return a panel of a histogram over time."""
    query = _query(f"sum by (le) (increase({metric}_bucket{{{labels}}}[$__rate_interval]))", "{{le}}")
    return (
        heatmap.Panel()
        .title(title)
        .description(description)
        .datasource(SOURCE)
        .unit(unit)
        .span(8)
        .height(8)
        .color(heatmap.HeatmapColorOptions().steps(64))
        .with_target(query.format(PromQueryFormat.HEATMAP))
    )


def _query(expression: str, legend: str = "__auto") -> Dataquery:
    return Dataquery().expr(expression).legend_format(legend).datasource(SOURCE)


def _thresholds(limits: Limits) -> ThresholdsConfig:
    steps = [Threshold(value=value, color=color) for value, color in limits]
    return ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps)
