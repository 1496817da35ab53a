"""The services that `benchmarks.reliability` hurts: their settings, models and taught heads."""

import asyncio
import contextlib
import importlib.util
import time
from collections.abc import Mapping
from pathlib import Path

import httpx

from benchmarks import checkpoints
from benchmarks.attack_calls import grpc_port
from benchmarks.attack_requests import (
    EXAMPLES,
    HEADS,
    KEY,
    LABELS,
    LARGE_EXAMPLES,
    LARGE_HEAD,
    MODEL,
    MODELS,
    form_of,
    small_picture,
)
from benchmarks.servers import Running

ADMIN = "admin"
KINDS = ("vit", "keys", "models", "tight", "clip", "teach")
_WITH_SEVERAL_MODELS = ("models", "tight", "teach")

# Until then after a kill a connection may end without an answer.
CUT_SECONDS = 12.0
_FIT_SECONDS = 600.0
_COMPILE_SECONDS = 120.0
# Models that the memory of `tight` holds.
_TIGHT_MODELS = 2
_PICTURES_OF_A_REQUEST = 64


class Service(Running):
    """A service that is started again after it has ended, as systemd or Docker would."""

    last_kill = -CUT_SECONDS

    def children(self, *, torch: bool) -> list[int]:
        """Return the engine processes, which have torch or OpenVINO in memory, or the workers."""
        pids = []
        with contextlib.suppress(OSError):
            path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
            for pid in map(int, path.read_text().split()):
                maps = Path(f"/proc/{pid}/maps").read_text()
                if ("libtorch" in maps or "libopenvino" in maps) == torch:
                    pids.append(pid)
        return pids

    async def until_ready(self, seconds: float = 300) -> float:
        """Wait until it is ready, start it again if it has ended, and return the seconds."""
        began = time.monotonic()
        async with httpx.AsyncClient(base_url=self.url, timeout=2) as client:
            while time.monotonic() - began < seconds:
                if self.process.poll() is not None:
                    self.launch()
                with contextlib.suppress(httpx.HTTPError):
                    if (await client.get("/readyz")).status_code == 200:
                        return time.monotonic() - began
                await asyncio.sleep(0.05)
        raise TimeoutError(f"not ready after {seconds:g} s:\n{self.log_end()}")


def settings_of(kind: str, folder: Path, workers: int) -> dict[str, str]:
    """Write the checkpoints of a kind of service into a folder, and return its settings."""
    models = folder / "models"
    first = models / MODELS[0]
    if kind == "clip":
        checkpoints.write_clip(first)
    else:
        names = MODELS if kind == "tight" else MODELS[:2]
        for seed, name in enumerate(names):
            checkpoints.write(models / name, checkpoints.VIT32, seed=seed)
    settings = {"VIT_WORKERS": str(workers), "VIT_DRAIN_DELAY": "0"}
    if importlib.util.find_spec("grpc") is not None:
        settings["VIT_GRPC_PORT"] = str(grpc_port())
    if kind in _WITH_SEVERAL_MODELS:
        settings |= {
            "VIT_MODELS": str(models),
            "VIT_MODEL_NAME": MODELS[0],
            "VIT_CHECKPOINT": "",
        }
    else:
        settings |= {"VIT_CHECKPOINT": str(first), "VIT_MODEL_NAME": MODEL}
    weights_bytes = (first / "model.safetensors").stat().st_size
    of_kind = {
        "vit": {"VIT_ADMIN_KEY": ADMIN, "VIT_CHECKPOINT_FOLDER": str(models)},
        "keys": {"VIT_API_KEYS": KEY},
        # A store for 68 inputs of 32 pixels is full at once, as the default store is after hours.
        "models": {"VIT_RECENT_BYTES": "256KiB"},
        # In float32, a model takes as many bytes as its file.
        "tight": {
            "VIT_MODELS_BYTES": str(weights_bytes * (2 * _TIGHT_MODELS + 1) // 2),
            "VIT_DTYPE": "float32",
        },
        "clip": {"VIT_LABELS": "cat,dog,car,tree,sky,house,street,apple,person,night"},
        "teach": {"VIT_TEACH": str(folder / "heads"), "VIT_ADMIN_KEY": ADMIN},
    }
    return settings | of_kind[kind]


async def prepare(kind: str, url: str, folder: Path) -> None:
    """Wait until the models are compiled, and teach the heads that attacks need.

    Raises:
        RuntimeError: the service is not as the attacks on it need it.
    """
    key = KEY if kind == "keys" else ADMIN
    headers = {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=url, timeout=60, headers=headers) as client:
        ready = await _ready_models(client)
        for name in ready:
            await _until_compiled(client, name)
        if kind == "models":
            for name in ready:  # the first map of a model takes a second
                picture = small_picture(0)
                answer = await client.post("/attention", content=picture, params={"model": name})
                answer.raise_for_status()
        if kind == "tight" and len(ready) != _TIGHT_MODELS:
            raise RuntimeError(f"{len(ready)} models fit, not {_TIGHT_MODELS}")
        if kind == "teach":
            await _teach(client, folder)


async def _ready_models(client: httpx.AsyncClient) -> list[str]:
    """Return the names of the models that answer, once none is loading."""
    deadline = time.monotonic() + _COMPILE_SECONDS
    while True:
        models = (await client.get("/models")).raise_for_status().json()
        if all(model["state"] != "loading" for model in models):
            return [model["name"] for model in models if model["state"] == "ready"]
        if time.monotonic() > deadline:
            raise RuntimeError(f"models are not loaded after {_COMPILE_SECONDS:g} s: {models}")
        await asyncio.sleep(0.2)


async def _until_compiled(client: httpx.AsyncClient, name: str) -> None:
    deadline = time.monotonic() + _COMPILE_SECONDS
    while True:
        answer = await client.get("/model", params={"model": name})
        if not answer.raise_for_status().json()["compiled"].startswith("compiling"):
            return
        if time.monotonic() > deadline:
            raise RuntimeError(f"{name} is not compiled after {_COMPILE_SECONDS:g} s")
        await asyncio.sleep(0.2)


async def _teach(client: httpx.AsyncClient, folder: Path) -> None:
    """Teach the heads that attacks need.

    One head gets `LARGE_EXAMPLES` pictures. Its file is then added under many names to the folder
    of models, because teaching as many large heads would take minutes. The heads of `HEADS` get
    `EXAMPLES` pictures each.
    """
    await _add_examples(client, LARGE_HEAD, range(LARGE_EXAMPLES))
    await _until_fitted(client, LARGE_HEAD)
    answer = await client.get(f"/heads/{LARGE_HEAD}/export")
    content = answer.raise_for_status().content
    for index in range(len(HEADS)):
        path = folder / "models" / f"large-{index:02}.safetensors"
        part = path.with_name(f".{path.name}")
        part.write_bytes(content)
        part.replace(path)
    for index, head in enumerate(HEADS):
        first = LARGE_EXAMPLES + index * EXAMPLES
        await _add_examples(client, head, range(first, first + EXAMPLES))
    for head in HEADS:
        await _until_fitted(client, head)
    await _until_heads_answer(client, 2 * len(HEADS) + 1)


async def _add_examples(client: httpx.AsyncClient, head: str, numbers: range) -> None:
    """Teach a head these pictures: the first half under the first label."""
    half = len(numbers) // 2
    for label, part in zip(LABELS, (numbers[:half], numbers[half:]), strict=True):
        for start in range(0, len(part), _PICTURES_OF_A_REQUEST):
            pictures = map(small_picture, part[start : start + _PICTURES_OF_A_REQUEST])
            content, headers = form_of(list(pictures))
            answer = await client.post(
                f"/heads/{head}/examples", content=content, headers=headers, params={"label": label}
            )
            answer.raise_for_status()
    count = sum(answer.json()["examples"].values())
    if count != len(numbers):
        raise RuntimeError(f"{head} has {count} examples, not {len(numbers)}")


async def _until_fitted(client: httpx.AsyncClient, head: str) -> None:
    deadline = time.monotonic() + _FIT_SECONDS
    while not (await client.get(f"/heads/{head}")).raise_for_status().json()["up_to_date"]:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{head} is not fitted after {_FIT_SECONDS:g} s")
        await asyncio.sleep(0.5)


async def _until_heads_answer(client: httpx.AsyncClient, count: int) -> None:
    """Wait until so many heads answer `model=*`, and raise `RuntimeError` if one fails."""
    picture = small_picture(0)
    deadline = time.monotonic() + _FIT_SECONDS
    while True:
        answer = await client.post("/classify?model=*", content=picture)
        models: Mapping[str, Mapping[str, object]] = answer.raise_for_status().json()["models"]
        answering = sum("predictions" in document for document in models.values())
        if answering >= count:
            return
        if time.monotonic() > deadline:
            raise RuntimeError(f"{answering} models answer, not {count}: {answer.text[:500]}")
        await asyncio.sleep(0.5)
