"""Records, their statistics and their tables."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import checkpoints, cpu, larger, memory
from benchmarks.load import Load
from benchmarks.peers import __main__ as peers_main
from benchmarks.peers import graph
from benchmarks.peers.__main__ import best_config
from benchmarks.peers.report import ratios, report, share_of_ours
from benchmarks.record import Record, medians, table
from benchmarks.servers import SERVERS


def _load(rate: float, p99: float = 10.0, refused: int = 0) -> dict[str, float]:
    return {"rate": rate, "p50": 5.0, "p90": 8.0, "p99": p99, "max": 20.0, "refused": refused, "broken": 0}


_MODEL = {
    "weights": "random, seed 0",
    "rounds": {
        "vitserve": [_load(100), _load(300), _load(200)],
        "mosec": [_load(100), _load(80), _load(90)],
        "mosec, OpenVINO": [_load(160)],
        "Ray Serve": [_load(50)],
        "Ray Serve, torch.compile": [_load(60)],
    },
    "pace": {"vitserve": [_load(45, p99=30)], "mosec": [_load(45, p99=60)]},
    "pace_rate": 45.0,
    "configs": {"mosec": {"PEER_THREADS": "1"}},
    "top1": {"mosec": {"same": 15, "same_above_margin": 14, "above_margin": 14, "pictures": 16}},
}


def test_a_record_says_where_on_what_and_how(tmp_path):
    record = Record(tmp_path / "record.json", dtype="bfloat16", about={"pictures": "none"})
    record.section("models", "vit32")["weights"] = "random"
    record.save()

    data = json.loads((tmp_path / "record.json").read_text())

    assert {"device", "versions", "dtype", "commands", "started", "finished", "pictures"} <= data.keys()
    assert data["device"]["cores"] >= 1
    assert data["versions"]["torch"]
    assert data["models"]["vit32"]["weights"] == "random"


def test_a_record_is_continued(tmp_path):
    path = tmp_path / "record.json"
    first = Record(path, dtype="bfloat16", about={})
    first.section("models", "vit32")["rounds"] = [1]
    first.save()

    assert Record(path, dtype="bfloat16", about={}).section("models", "vit32")["rounds"] == [1]


def test_medians_are_of_each_value():
    assert medians([{"rate": 1, "p99": 9}, {"rate": 3, "p99": 7}, {"rate": 2, "p99": 8}]) == {"rate": 2, "p99": 8}
    assert medians([]) == {}


def test_ratios_are_to_the_best_peer_with_each_engine():
    assert ratios(_MODEL) == pytest.approx(
        {
            "rate, of the best peer's": 200 / 90,
            "rate, of the best peer's with OpenVINO": 200 / 160,
            "p99 at the pace, of the least of a peer": 0.5,
        }
    )


def test_servers_measured_at_different_times_are_compared_by_ours_in_the_same_slices():
    rates = {"vitserve": (400, 200, 210), "mosec": (None, 100, 105), "FastAPI": (160,), "KServe, OpenVINO": ()}
    rounds = {
        name: [_load(rate) | {"slice": slice_} for slice_, rate in enumerate(done) if rate]
        for name, done in rates.items()
    }

    found = ratios({"rounds": rounds})

    # FastAPI's 160 beside 400 are less than mosec's 102.5 beside 205.
    assert found == pytest.approx({"rate, of the best peer's": 2})
    assert share_of_ours({"rounds": rounds}, "FastAPI") == pytest.approx(0.4)
    assert share_of_ours({"rounds": rounds}, "KServe, OpenVINO") is None


class _Pretended(peers_main.Comparison):
    """Servers that are never started; measuring moves the clock."""

    now = 0.0

    @contextmanager
    def _started(self, rows):
        started = SimpleNamespace(start_seconds=1.0, thawed=nullcontext, hold=lambda: None)
        yield dict.fromkeys(range(len(rows)), (started, None)), {}

    def _closed(self, started, load, seconds):
        type(self).now += seconds + 1.9
        return Load(100.0, p50=5.0, p90=8.0, p99=10.0, max=20.0, refused=0, broken=0), 0.1

    def _check(self, name, server, started):
        pass

    def _limit(self):
        return {"rate": 500.0}


def test_every_turn_of_peers_begins_with_vitserve_and_waits_where_its_slice_is_over(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "ensure", lambda name: (tmp_path, "random"))
    monkeypatch.setattr(graph, "ensure", lambda folder: folder)
    monkeypatch.setattr("time.monotonic", lambda: _Pretended.now)
    waits: list[float] = []
    monkeypatch.setattr("builtins.input", lambda prompt: waits.append(_Pretended.now))
    (tmp_path / "picture").touch()
    record = Record(tmp_path / "record.json", dtype="bfloat16", about={})
    servers = [server for server in SERVERS if server.name in ("mosec", "KServe")]

    def measure(**more: object) -> None:
        arguments = Namespace(
            **{"rounds": 3, "seconds": 4, "slice": 40, "engines": ["torch"], "rows": None, "connections": 32} | more
        )
        _Pretended(record, "vit32", [tmp_path / "picture"], arguments, servers).rounds()

    measure()
    measure(rounds=1, engines=["openvino"], slice=None)

    rounds = record.section("models", "vit32", "rounds")
    assert {name: [round_["slice"] for round_ in done] for name, done in rounds.items()} == {
        "vitserve": [1, 2, 3, 4],
        "mosec": [1, 2, 3],
        "KServe": [1, 2, 3],
        "mosec, OpenVINO": [4],
        "KServe, OpenVINO": [4],
    }
    # Two turns of 17.7 s fit into the first slice, the third does not.
    assert waits == pytest.approx([0, 35.4])


def test_the_fastest_configuration_that_lost_nothing_is_kept():
    tried: list[dict[str, Any]] = [
        {"config": {"A": "1"}, **_load(100)},
        {"config": {"A": "2"}, **_load(500, refused=3)},
        {"config": {"A": "3"}, **_load(200)},
        {"config": {"A": "4"}, "failed": "no answer"},
    ]

    assert best_config(tried) == {"A": "3"}
    assert best_config(tried[1:2]) == {"A": "2"}
    assert best_config(tried[3:]) is None


def test_the_report_of_peers_names_versions_settings_and_the_fastest_first(tmp_path):
    data = Record(tmp_path / "record.json", dtype="bfloat16", about={"connections": 32, "pictures": "16"}).data
    data |= {"models": {"vit32": _MODEL}, "servers": {"mosec": "0.9.8", "vitserve": "0.1.0"}}

    text = report(data)

    rows = [line for line in text.splitlines() if line.startswith("| ") and "---" not in line]
    assert [row.split("|")[1].strip() for row in rows[1:]] == [
        "vitserve 0.1.0",
        "mosec 0.9.8, OpenVINO",
        "mosec 0.9.8, torch",
        "Ray Serve, torch.compile",
        "Ray Serve, torch",
    ]
    assert rows[1] == "| vitserve 0.1.0 | 200 (100 to 300) | 1.00 | 5, 10 |"
    assert "- the same top-1 wherever its margin exceeds 2 %: all 1" in text
    assert "- mosec: PEER_THREADS=1" in text
    assert "- rate, of the best peer's: 2.22" in text
    assert "- p99 at 45.0/s, ms: vitserve 30, mosec 60" in text


def test_the_report_of_larger_models_compares_with_the_best_of_both_streams():
    served = {"rate": 9.0, "p50": 100.0, "mib_ready": 300.4, "mib_loaded": 400.0, "ready_seconds": 2.0}
    model = {
        "streams 2": {"benchmark_app": 8.0, "vitserve": served | {"rate": 6.0}},
        "streams 1": {"benchmark_app": 12.0, "vitserve": served},
    }

    rows = larger.report({"models": {"ViT-S-16": model}}).splitlines()[2:]

    assert [row.split(" | ")[5] for row in rows] == ["0.50", "0.75"]


def test_the_report_of_the_cpu_survives_a_record_that_has_just_begun(tmp_path):
    data = Record(tmp_path / "record.json", dtype="bfloat16", about={}).data
    data["models"] = {"bundled": {"weights": "bundled", "memory": {"start_seconds": [3.0, 1.0, 2.0]}}}

    assert "| start to ready, s (median) | 2.00 |" in cpu.report(data)


def test_a_table_is_markdown():
    assert table(("", "a"), [("x", 123.4), ("y", None)]) == "|  | a |\n| --- | ---: |\n| x | 123 |\n| y |  |"


def test_memory_of_this_process_is_seen():
    import os

    [found] = memory.processes([os.getpid()])

    assert 0 < found["pss_mib"] <= found["rss_mib"]
    assert 0 < memory.anonymous(os.getpid()) < found["rss_mib"] + 64
    with pytest.raises(ValueError, match="Swap"):
        memory.mebibytes("Rss: 1 kB", "Swap")


@pytest.mark.parametrize("server", SERVERS, ids=lambda server: server.name)
def test_every_server_has_configurations_and_a_program(server):
    import importlib.util

    assert len({tuple(sorted(config.items())) for config in server.candidates}) == len(server.candidates) > 1
    assert all(config["PEER_ENGINE"] == "openvino" for config in server.openvino)
    module = next(part.partition(":")[0] for part in server.command if part not in ("-m", "serve", "bentoml"))
    assert importlib.util.find_spec(module) is not None


@pytest.mark.parametrize("main", [cpu, peers_main], ids=["cpu", "peers"])
def test_without_arguments_everything_is_measured(main, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["benchmark"])
    arguments = vars(main._arguments())

    assert len(arguments.get("sections") or arguments["phases"]) > 1


def test_a_phase_that_does_not_exist_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmark", "rest"])

    with pytest.raises(SystemExit):
        peers_main._arguments()

    assert "choose from tune, rounds, pace, report" in capsys.readouterr().err
