"""The load generator, records, the comparison of answers and the GPU's script of the benchmarks."""

import asyncio
import importlib.metadata
import json
import re
import subprocess
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from benchmarks import checkpoints, gpu, gpu_kit, gpu_steps
from benchmarks.attack_requests import HOSTILE, Callers, form_of, hang_ups, post, relabels
from benchmarks.attacked_services import KINDS
from benchmarks.attacks import ATTACKS, OTHERS
from benchmarks.explanations import (
    RANDOM,
    Maps,
    counted_quarters,
    main,
    measure,
    mosaic,
    quarter_share,
)
from benchmarks.honest import Honest, told_apart
from benchmarks.load import Load, Loader
from benchmarks.record import Record, table
from benchmarks.reliability import Quiet, missed
from benchmarks.servers import OURS


def test_the_generator_counts_each_outcome(tmp_path):
    picture = tmp_path / "a.jpg"
    picture.write_bytes(b"picture")
    seen: list[bytes] = []

    async def serve(reader, writer):
        while head := await reader.readuntil(b"\r\n\r\n"):
            await reader.readexactly(7)
            seen.append(head)
            if len(seen) % 3 == 0:
                break
            status = b"200 OK" if len(seen) % 3 == 1 else b"503 Service Unavailable"
            writer.write(b"HTTP/1.1 " + status + b"\r\nContent-Length: 2\r\n\r\n{}")
        writer.close()

    async def run() -> tuple[Load, Load]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        load = Loader([picture], OURS)
        async with server:
            opened = await asyncio.to_thread(load.run, url, rate=100, seconds=0.3)
            return opened, await asyncio.to_thread(load.run, url, connections=2, seconds=0.2)

    opened, closed = asyncio.run(run())
    assert len(seen) >= opened.rate * 0.3 + opened.refused + opened.broken > 3
    assert all(
        load.p50 <= load.p99 <= load.max and load.refused and load.broken
        for load in (opened, closed)
    )
    assert all(head.startswith(b"POST /classify HTTP/1.1\r\n") for head in seen)


def test_a_saved_record_can_be_continued(tmp_path):
    path = tmp_path / "record.json"
    first = Record(path, dtype="bfloat16", about={"pictures": "none"})
    first.section("models", "vit32")["rounds"] = [1]
    first.save()
    data = json.loads(path.read_text())
    assert {
        "device",
        "versions",
        "dtype",
        "commits",
        "started",
        "finished",
        "pictures",
    } <= data.keys()
    assert Record(path, dtype="bfloat16", about={}).section("models", "vit32")["rounds"] == [1]
    assert (
        table(("", "a"), [("x", 123.4), ("y", None)])
        == "|  | a |\n| --- | ---: |\n| x | 123 |\n| y |  |"
    )


def test_mixed_up_answers_are_recognised():
    scores = [{0: 0.9, 1: 0.1}, {0: 0.1, 1: 0.9}, {2: 0.9}, {3: 0.9}]
    assert told_apart([b""] * 4, scores) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="only 1 of 2 pictures"):
        told_apart([b""] * 2, [scores[0], scores[0]])

    other = {0: 0.5, 1: 0.5}
    honest = Honest(None, [b""], [[scores[0], other]])  # type: ignore[arg-type]  # nothing is sent

    def answer(first: float, second: float) -> dict[str, object]:
        return {"predictions": [{"index": 0, "score": first}, {"index": 1, "score": second}]}

    assert honest.fits(0, answer(0.9, 0.1))
    assert honest.fits(0, answer(0.5, 0.5))
    assert not honest.fits(0, answer(0.9, 0.5))
    assert not honest.fits(0, answer(0.1, 0.9))


@pytest.mark.parametrize("outcome", ["421", "404", "500", "not kept"])
def test_wrong_outcome_of_attackers_misses(outcome: str) -> None:
    told = {"answered": 1.0, "p99": 20.0}
    attackers = Callers(post(b""), HOSTILE)
    attackers.counts["503"] = 300
    assert missed(told, Quiet(20.0), {"attackers": attackers}) == []
    attackers.counts[outcome] = 1
    marks = missed(told, Quiet(20.0), {"attackers": attackers})
    assert marks == [f"attackers got {outcome}: 1"]


def test_attack_without_requests_misses() -> None:
    told = {"answered": 1.0, "p99": 20.0}
    marks = missed(told, Quiet(20.0), {"attackers": Callers(post(b""), HOSTILE)})
    assert marks == ["the attack sent nothing"]


def test_slow_honest_calls_miss_their_mark() -> None:
    told = {"answered": 1.0, "p99": 20.0}
    calls = Callers(post(b""), "127.0.0.7", longest=3, seconds=[0.031])
    assert missed(told, Quiet(20.0, {"grpc": 11.0}), {"grpc": calls}) == []
    marks = missed(told, Quiet(20.0, {"grpc": 10.0}), {"grpc": calls})
    assert marks == ["grpc p50 3.1 x"]


def test_every_attack_names_known_callers() -> None:
    for attack in ATTACKS.values():
        assert attack.service in KINDS
        assert set(attack.beside) <= OTHERS.keys()


def test_hang_ups_leave_before_the_answer() -> None:
    async def answer(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(1)
        return httpx.Response(200)

    async def run() -> str:
        transport = httpx.MockTransport(answer)
        async with httpx.AsyncClient(transport=transport, base_url="http://any") as client:
            return await hang_ups("/heads/large/examples")(client, 0)

    assert asyncio.run(run()) == "left"


def test_relabels_visit_every_head() -> None:
    seen: list[str] = []

    async def answer(request: httpx.Request) -> httpx.Response:
        seen.append(str(request.url).removeprefix("http://any"))
        return httpx.Response(200)

    async def run() -> None:
        transport = httpx.MockTransport(answer)
        async with httpx.AsyncClient(transport=transport, base_url="http://any") as client:
            for number in (0, 1, 60, 60 * 32):
                await relabels()(client, number)

    asyncio.run(run())
    assert seen == [
        "/heads/head-00/examples/1?label=dog",
        "/heads/head-01/examples/1?label=dog",
        "/heads/head-00/examples/2?label=dog",
        "/heads/head-00/examples/33?label=cat",
    ]


def test_a_form_contains_files_with_fields() -> None:
    content, headers = form_of([b"picture"], model="a,b")
    assert headers["Content-Type"].startswith("multipart/form-data; boundary=")
    assert content.count(b'name="file"; filename="a"') == 1
    assert b'name="model"\r\n\r\na,b\r\n' in content


@pytest.mark.timeout(120)
def test_host_side_is_measured_without_gpu(tmp_path: Path) -> None:
    assert gpu.main(["--device", "null", "--smoke", "--out", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "smoke" / "null_device.json").read_text())
    [found] = record["engine, 12075/s"]["1 clients"]
    assert found["pictures/s"] > 0
    assert 1 <= found["mean batch"] <= 4
    assert min(found["loop us"], found["streams us"], found["client us"]) > 0


@pytest.mark.timeout(120)
def test_the_gpu_script_runs_small_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "CACHE", tmp_path / "cache")
    arguments = gpu.parse(["--device", "cpu", "--smoke", "--out", str(tmp_path)])
    arguments.seconds = 0.05
    for step in ("maps", "engine", "profile", "decode", "reload"):
        gpu_steps.run_step(arguments, step)
    arguments.workers = [1]
    gpu_steps.run_step(arguments, "pixels")
    found = json.loads((tmp_path / "smoke" / "gpu.json").read_text())
    assert found["marks"]["batches of 4: with relevance / ours"]["found"] > 0
    assert found["marks"]["batches of 4: engine process / ours"]["found"] > 0
    assert "layer_norm" in found["profile"]["a batch of 4"]
    assert found["engine"]["batches of 4"][0]["mean batch"] >= 1
    assert "in shared memory" in found["engine"]["batches of 4"][0]
    assert found["engine"]["batches of 4, 1 clients"]["images/s"] > 0
    assert found["decode"]  # rates, or why torchvision does not run here
    assert found["pixels"]["HTTP"][0]["rate"] > 0
    assert found["marks"]["largest difference of a logit over all loads"]["reached"]


PLACES = torch.tensor([0, 5, 9, 14])
"""Return the number of the bright patch, of 4 x 4, in pictures of each class."""


def picture(number: int) -> Tensor:
    """Return an image of 16 x 16 pixels, of class `number` modulo four."""
    pixels = torch.zeros(16)
    pixels[PLACES[number % 4]] = 1.0
    return pixels.reshape(1, 4, 4).repeat_interleave(4, 1).repeat_interleave(4, 2)


def brightness(pixels: Tensor, classes: Tensor) -> Tensor:
    return torch.nn.functional.avg_pool2d(pixels, 4)[:, 0]


def score(pixels: Tensor) -> Tensor:
    """A model whose score of a class is the brightness of its patch."""
    return brightness(pixels, PLACES).flatten(1)[:, PLACES]


def noise(pixels: Tensor, classes: Tensor) -> Tensor:
    return torch.rand((len(classes), 4, 4), generator=torch.Generator().manual_seed(3))


def test_a_right_map_beats_noise() -> None:
    methods: dict[str, Maps] = {RANDOM: noise, "right": brightness}
    found = measure(score, methods, picture, 8, steps=16)
    deleted, inserted, _ = found["right"].means()
    by_chance, inserted_by_chance, _ = found[RANDOM].means()
    assert deleted == pytest.approx(1 / 32)  # missing without the first of sixteen patches
    assert by_chance is not None
    assert by_chance > 0.2
    assert inserted is not None
    assert inserted_by_chance is not None
    assert inserted > inserted_by_chance
    assert len(found["right"].deletion) == 8


def test_mosaic_quarters_keep_reading_order() -> None:
    whole = mosaic(torch.arange(4.0).reshape(4, 1, 1, 1).expand(4, 1, 5, 6))
    assert whole[0].tolist() == [[0] * 3 + [1] * 3] * 2 + [[2] * 3 + [3] * 3] * 3
    assert counted_quarters(torch.arange(40.0), torch.tensor([39, 38, 38, 2])) == [0]
    left = torch.tensor([[1.0, 1.0, 0.0]] * 3)
    assert [quarter_share(left, quarter) for quarter in range(4)] == pytest.approx(
        [0.375, 0.125, 0.375, 0.125]
    )
    assert quarter_share(-left, 0) == 0.25


@pytest.mark.timeout(60)
def test_the_command_measures_bundled_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(4):
        colours = np.random.default_rng(number).integers(0, 256, (2, 2, 3), dtype=np.uint8)
        Image.fromarray(colours.repeat(16, axis=0).repeat(16, axis=1)).save(
            tmp_path / f"{number}.png"
        )
    main(["--data", str(tmp_path), "--steps", "4", "--methods", "cls", "gae"])
    told = capsys.readouterr().out
    assert "4 pictures, 4 steps" in told
    assert [line.split()[1] for line in told.splitlines() if line.startswith("| ")][2:] == [
        RANDOM,
        "cls",
        "gae",
    ]


def test_the_kit_has_what_tells_of_vitserve(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: None)  # the download of the peers
    gpu_kit.make_kit(tmp_path / "kit", resize=Path(__file__))
    [about] = importlib.metadata.distributions(path=[str(tmp_path / "kit")])
    assert about.name == "vitserve"
    assert any(each.startswith("starlette") for each in about.requires or [])


def test_calls_of_the_gpu_page_fit_ten_minutes() -> None:
    page = (checkpoints.REPOSITORY / "benchmarks" / "GPU.md").read_text()
    calls = re.findall(r"^\| \d+ \| `python -m benchmarks\.gpu (.+?)` \|", page, re.MULTILINE)
    runs = [gpu.parse(call.split()) for call in calls]
    assert 1 <= len(runs) <= 4
    assert sorted(step for run in runs for step in run.only) == sorted(gpu.STEPS)
    for run in runs:
        seconds = gpu.seconds_of(run.only, run.limit)
        assert sum(seconds.values()) + gpu.KILL_SECONDS <= 600
        assert all(seconds[step] >= gpu.STEPS[step] for step in run.only)  # none is cut short


def test_limit_bounds_each_step_of_a_gpu_run() -> None:
    assert gpu.seconds_of(["engine"], 540) == {"engine": 540}
    assert gpu.seconds_of(["engine"], 100) == {"engine": 100}
    assert gpu.seconds_of([], 540) == {}
