"""The tables of a record of `benchmarks.peers`, in Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.record import medians, table

TITLES = {
    "vit32": "(a) ViT, 32 px, patch 4, 192 wide, 9 layers",
    "vit224": "(b) ViT-Ti/16, 224 px",
}
_OURS = "vitserve"
COMPILED = ", torch.compile"
"""After the name of a peer whose module was compiled."""

OPENVINO = ", OpenVINO"
"""After the name of a peer with vitserve's graph in OpenVINO."""


def report(data: Mapping[str, Any]) -> str:
    """One table of all models, then each model's ratios and what a reader has to know about them."""
    device, versions = data["device"], data["versions"]
    models = {name: model for name, model in data.get("models", {}).items() if model.get("rounds")}
    lines = [
        f"{device['cpu']}, {device['cores']} cores ({', '.join(device['features'])}); "
        "load generator on the same cores.",
        f"{data['connections']} connections; {data['pictures']}; {data['dtype']}; torch {versions['torch']}, "
        f"transformers {versions.get('transformers', '?')}, wrk {versions.get('wrk', '?')}.",
        "",
        _table(models, data.get("servers", {})),
    ]
    for name, model in models.items():
        lines += ["", f"### {TITLES.get(name, name)}: {model['weights']}", "", *_notes(model)]
    lines += [f"\nNot measured: {reason}" for reason in data.get("not_installed", {}).values()]
    return "\n".join(lines)


def ratios(model: Mapping[str, Any]) -> dict[str, float]:
    """vitserve's rate over the best peer's with the module of transformers, and over the best with our engine.

    And its p99 at the pace over the least p99 of any peer.
    """
    found: dict[str, float] = {}
    for engine, ours in (("the best peer's", False), ("the best peer's with OpenVINO", True)):
        peers = [name for name in model["rounds"] if is_peer(name) and name.endswith(OPENVINO) == ours]
        if shares := [share for name in peers if (share := share_of_ours(model, name))]:
            found[f"rate, of {engine}"] = 1 / max(shares)
    tails = _tails(model)
    slow = [tail for name, tail in tails.items() if is_peer(name)]
    if _OURS in tails and slow:
        found["p99 at the pace, of the least of a peer"] = tails[_OURS] / min(slow)
    return found


def share_of_ours(model: Mapping[str, Any], name: str) -> float | None:
    """A row's median rate over vitserve's in the same slices; None where they have none in common."""
    rounds = [model["rounds"].get(row, []) for row in (name, _OURS)]
    common = set.intersection(*({round_.get("slice") for round_ in done} for done in rounds))
    beside = [medians(round_ for round_ in done if round_.get("slice") in common) for done in rounds]
    return beside[0]["rate"] / beside[1]["rate"] if common else None


def is_peer(name: str) -> bool:
    """Whether a row is a peer's."""
    return not name.startswith(_OURS)


def _table(models: dict[str, Any], servers: Mapping[str, str]) -> str:
    """A line for each server and engine, the fastest in the first model first."""
    header = [""]
    for name in models:
        header += [f"{TITLES.get(name, name).partition(' ')[0]} answered/s", "of vitserve's", "p50, p99"]
    rates: dict[str, float] = {}
    for model in reversed(models.values()):
        rates |= {name: medians(done)["rate"] for name, done in model["rounds"].items() if done}
    rows = [[_label(name, servers), *_cells(models, name)] for name in sorted(rates, key=lambda name: -rates[name])]
    if any("limit" in model for model in models.values()):
        limits = [[model.get("limit", {}).get("rate"), None, None] for model in models.values()]
        rows.append(["no server: OpenCV, `AsyncInferQueue`", *(cell for cells in limits for cell in cells)])
    return table(header, rows)


def _label(name: str, servers: Mapping[str, str]) -> str:
    server, _, rest = name.partition(", ")
    engine = rest or ("torch" if is_peer(name) else "")
    return ", ".join(filter(None, (f"{server} {servers.get(server, '')}".strip(), engine)))


def _cells(models: Mapping[str, Any], name: str) -> list[object]:
    cells: list[object] = []
    for model in models.values():
        if not (done := model["rounds"].get(name)):
            cells += [None, None, None]
            continue
        middle, rates = medians(done), [round_["rate"] for round_ in done]
        cells += [f"{middle['rate']:.3g} ({min(rates):.3g} to {max(rates):.3g})", share_of_ours(model, name)]
        cells.append(f"{middle['p50']:.3g}, {middle['p99']:.3g}")
    return cells


def _tails(model: Mapping[str, Any]) -> dict[str, float]:
    return {name: medians(done)["p99"] for name, done in model.get("pace", {}).items() if done}


def _notes(model: Mapping[str, Any]) -> list[str]:
    lines = [f"- {name}: {ratio:.2f}" for name, ratio in ratios(model).items()]
    if tails := _tails(model):
        listed = ", ".join(f"{name} {tail:.0f}" for name, tail in sorted(tails.items(), key=lambda pair: pair[1]))
        lines.append(f"- p99 at {model['pace_rate']}/s, ms: {listed}")
    for name, done in model["rounds"].items():
        if lost := sum(round_["refused"] + round_["broken"] for round_ in done):
            lines.append(f"- {name}: {lost} requests without a 200")
    tops = model.get("top1", {})
    lines += [
        f"- {name}: the same top-1 for {top['same_above_margin']} of {top['above_margin']} whose margin exceeds 2 %"
        for name, top in tops.items()
        if top["same_above_margin"] < top["above_margin"]
    ] or [f"- the same top-1 wherever its margin exceeds 2 %: all {len(tops)}"]
    configs = model.get("configs", {})
    lines += [f"- {name}: {_settings(config)}" for name, config in configs.items() if is_peer(name)]
    lines += [f"- {name} failed: {reason.splitlines()[-1]}" for name, reason in model.get("failed", {}).items()]
    return lines


def _settings(config: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in config.items())
