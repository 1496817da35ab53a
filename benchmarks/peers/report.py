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
    """Every model's table, its ratios, and what a reader has to know about them."""
    device, versions = data["device"], data["versions"]
    lines = [
        f"{device['cpu']}, {device['cores']} cores ({', '.join(device['features'])}); "
        "load generator on the same cores.",
        f"{data['connections']} connections; {data['pictures']}; {data['dtype']}; torch {versions['torch']}, "
        f"transformers {versions.get('transformers', '?')}, wrk {versions.get('wrk', '?')}.",
    ]
    for name, model in data.get("models", {}).items():
        lines += ["", f"### {TITLES.get(name, name)}: {model['weights']}", "", *_model(model, data.get("servers", {}))]
    lines += [f"\nNot measured: {reason}" for reason in data.get("not_installed", {}).values()]
    return "\n".join(lines)


def ratios(model: Mapping[str, Any]) -> dict[str, float]:
    """Each of our rows over the best peer with the module of transformers, and over the best with our engine.

    By rate; and by p99 at the pace over the least p99 of any peer.
    """
    rates = {name: medians(done)["rate"] for name, done in model.get("rounds", {}).items() if done}
    tails = {name: medians(done)["p99"] for name, done in model.get("pace", {}).items() if done}
    found: dict[str, float] = {}
    for name in (name for name in rates if name.startswith(_OURS)):
        for engine, ours in (("the best peer's", False), ("the best peer's with OpenVINO", True)):
            theirs = [rate for peer, rate in rates.items() if is_peer(peer) and peer.endswith(OPENVINO) == ours]
            if theirs:
                found[f"{name}: rate, of {engine}"] = rates[name] / max(theirs)
        slow = [tail for peer, tail in tails.items() if is_peer(peer)]
        if name in tails and slow:
            found[f"{name}: p99 at the pace, of the least of a peer"] = tails[name] / min(slow)
    return found


def is_peer(name: str) -> bool:
    """Whether a row is a peer's."""
    return not name.startswith(_OURS)


def _model(model: Mapping[str, Any], servers: Mapping[str, str]) -> list[str]:
    rows = []
    for name, done in model.get("rounds", {}).items():
        if not done:
            continue
        peak, tail = medians(done), medians(model.get("pace", {}).get(name, []))
        top1 = model.get("top1", {}).get(name)
        version = servers.get(name.partition(",")[0], "")
        rates = [round_["rate"] for round_ in done]
        rows.append(
            (
                f"{name} {version}",
                peak["rate"],
                f"{min(rates):.0f}-{max(rates):.0f}",
                peak["p50"],
                peak["p99"],
                int(sum(round_["refused"] + round_["broken"] for round_ in done)),
                tail.get("p50"),
                tail.get("p99"),
                f"{top1['same_above_margin']}/{top1['above_margin']}" if top1 else None,
            )
        )
    rows.sort(key=lambda row: -float(row[1]))
    pace = f" at {model['pace_rate']}/s" if "pace_rate" in model else " at the pace"
    header = ("", "answered/s", "rounds", "p50 ms", "p99 ms", "not 200", f"p50 ms{pace}", f"p99 ms{pace}", "top-1")
    lines = [table(header, rows), ""]
    if limit := model.get("limit"):
        lines += [f"- in-process, OpenCV and AsyncInferQueue without HTTP: {limit['rate']:.0f} pictures/s"]
    lines += [f"- {name}: {ratio:.2f}" for name, ratio in ratios(model).items()]
    configs = model.get("configs", {})
    lines += [f"- {name}: {_settings(config)}" for name, config in configs.items() if config]
    lines += [f"- {name} failed: {reason.splitlines()[-1]}" for name, reason in model.get("failed", {}).items()]
    return lines


def _settings(config: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in config.items())
