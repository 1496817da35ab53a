"""Servers under test: how each is started, asked and stopped. One class, one table."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import REPOSITORY
from benchmarks.load import Protocol

PEERS = REPOSITORY / "benchmarks" / ".peers"
_MARK = "VITSERVE_BENCHMARK"
_DRAIN_SECONDS = 0.6
"""Until a server has computed what its callers no longer wait for."""

Config = Mapping[str, str]
"""Environment variables that configure a server."""


class ServerFailed(Exception):
    """A server ended, or was not ready in time; the message holds the end of its log."""


@dataclass(frozen=True)
class Server:
    """One way to serve.

    Attributes:
        command: python's arguments; `{port}` is filled in.
        environment: folder of the environment under `.peers`; None is the one that runs the benchmark.
        distribution: package whose version the record names.
        candidates: configurations that are tried, the fastest with model (a) first, taken where none was tried;
            a peer's are with the module of transformers.
        openvino: a peer's with vitserve's graph in OpenVINO.
        extra: environment that every candidate has.
        held: whether it may be held (SIGSTOP) while another is measured.
    """

    name: str
    command: Sequence[str]
    protocol: Protocol
    distribution: str
    environment: str | None = None
    candidates: Sequence[Config] = field(default_factory=lambda: [{}])
    openvino: Sequence[Config] = ()
    extra: Config = field(default_factory=dict)
    held: bool = True

    @property
    def python(self) -> Path:
        """The interpreter that runs it."""
        return Path(sys.executable) if self.environment is None else PEERS / self.environment / "bin" / "python"

    def version(self) -> str:
        """Of its distribution, as installed.

        Raises:
            ServerFailed: it is not installed.
        """
        code = f"import importlib.metadata as m; print(m.version({self.distribution!r}))"
        try:
            done = subprocess.run([self.python, "-c", code], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise ServerFailed(f"{self.name}: {self.distribution} is not installed: run make bench-peers") from error
        return done.stdout.strip()


class Running:
    """A started server.

    Attributes:
        start_seconds: until it was ready, and had compiled.
        answer_seconds: until its first answer.
        held: whether it is held while it is not `thawed`.
    """

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path, mark: str) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"
        self.start_seconds = self.answer_seconds = 0.0
        self.held = False
        self._port = port
        self._log = log
        self._mark = f"{_MARK}={mark}"

    @property
    def log(self) -> str:
        """What it has written."""
        return self._log.read_text(errors="replace")

    def pids(self) -> list[int]:
        """Every process of this server, daemons included: those that inherited its mark."""
        return _marked(self._mark)

    @contextmanager
    def thawed(self) -> Iterator[None]:
        """Let all of its processes run, then hold them: some servers poll while idle, and take a fifth of a core.

        They are held before the first time, too. Nothing is done where `running` was not told to hold it.
        """
        if self.held:
            self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            if self.held:
                # A batch that was held half-way would count as a slow one: BentoML then refuses for fear of the next.
                time.sleep(_DRAIN_SECONDS)
            self.hold()

    def hold(self) -> None:
        """Stop all of its processes, where it is held at all: whoever shares the machine may have woken them."""
        if self.held:
            self._signal(signal.SIGSTOP)

    def processor_seconds(self) -> float:
        """Processor time of the processes that live now: it says more than a rate where others share the machine."""
        ticks = 0
        for pid in self.pids():
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def _signal(self, number: signal.Signals) -> None:
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def stop(self) -> None:
        """SIGTERM, then SIGKILL for whatever of it is left after a while.

        Raises:
            ServerFailed: its port is still open.
        """
        self._signal(signal.SIGCONT)
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(15)
        deadline = time.monotonic() + 3
        while (left := self.pids()) and time.monotonic() < deadline:
            time.sleep(0.1)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(15)
        deadline = time.monotonic() + 10
        while (self.pids() or not _closed(self._port)) and time.monotonic() < deadline:
            time.sleep(0.1)
        if not _closed(self._port):
            raise ServerFailed(f"port {self._port} is still open after its server was stopped")


@contextmanager
def running(
    server: Server, model: Path, config: Config, *, picture: bytes, timeout: float = 120, held: bool = False
) -> Iterator[Running]:
    """Start a server, wait until it answers, stop it with all its processes.

    Args:
        model: folder of the checkpoint.
        config: one of the server's candidates.
        picture: JPEG that it has to classify to count as ready.
        timeout: seconds until it must be ready.
        held: whether it is held once it is ready, see `Running.thawed`.

    Raises:
        ServerFailed: it ended, or was not ready in time.
    """
    port, mark = free_port(), uuid.uuid4().hex
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("VIT_", "PEER_"))}
    environment |= {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH")))),
        # Threads of OpenMP that spin between operators starve whatever else runs on the same cores.
        "OMP_WAIT_POLICY": "PASSIVE",
        "PEER_MODEL": str(model),
        "PEER_PORT": str(port),
        "VIT_CHECKPOINT": str(model),
        "VIT_PORT": str(port),
        "VIT_LOG_LEVEL": "warning",
        _MARK: mark,
    }
    environment |= {**server.extra, **config}
    with tempfile.TemporaryDirectory(prefix="vitserve-bench-") as folder:
        log = Path(folder) / "log"
        command = [str(server.python), *(part.format(port=port) for part in server.command)]
        with log.open("wb") as out:
            started = time.monotonic()
            process = subprocess.Popen(
                command, cwd=REPOSITORY, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
        found = Running(process, port, log, mark)
        try:
            found.answer_seconds = _wait(server, found, picture, timeout) - started
            found.start_seconds = time.monotonic() - started
            found.held = held
            found.hold()
            yield found
        finally:
            found.stop()


def _wait(server: Server, found: Running, picture: bytes, timeout: float) -> float:
    """Wait until it answers and has compiled; return the moment of the first answer."""
    deadline = time.monotonic() + timeout
    reason, answered = "no answer", 0.0
    while time.monotonic() < deadline:
        if found.process.poll() is not None:
            raise ServerFailed(f"{server.name} ended with {found.process.returncode}:\n{found.log[-3000:]}")
        try:
            ask(found.url, server.protocol, picture)
        except (OSError, ValueError, KeyError) as error:
            reason = repr(error)
        else:
            answered = answered or time.monotonic()
            if server.distribution != "vitserve" or _compiled(found.url):
                return answered
        time.sleep(0.1)
    raise ServerFailed(f"{server.name} was not ready within {timeout:g} s ({reason}):\n{found.log[-3000:]}")


def _compiled(url: str) -> bool:
    """vitserve compiles on a thread while it already answers."""
    with urllib.request.urlopen(f"{url}/model", timeout=10) as answer:
        return not str(json.load(answer)["compiled"]).startswith("compiling")


def ask(url: str, protocol: Protocol, picture: bytes) -> int:
    """The best class of one picture.

    Raises:
        OSError: no server there, or a status other than 200.
        ValueError, KeyError: an answer of another form.
    """
    request = urllib.request.Request(url + protocol.path, protocol.wrap(picture), protocol.headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return protocol.top1(answer.read())


def resident_mib(pid: int) -> float:
    """MiB resident of a process and its children; a page that several map counts once (PSS)."""
    total, pids = 0, [pid]
    for each in pids:
        with contextlib.suppress(OSError):  # it has ended
            for thread in Path(f"/proc/{each}/task").iterdir():
                pids += map(int, (thread / "children").read_text().split())
            lines = Path(f"/proc/{each}/smaps_rollup").read_text().splitlines()
            total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return round(total / 1024, 1)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _closed(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def _marked(mark: str) -> list[int]:
    """Every process that was started with this variable, `NAME=VALUE`, in its environment."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
    return sorted(found)


_BOUNDARY = "benchmark-boundary"


def _multipart(data: bytes) -> bytes:
    head = (
        f"--{_BOUNDARY}\r\n"
        'Content-Disposition: form-data; name="file"; filename="picture.jpg"\r\n'
        "Content-Type: image/jpeg\r\n\r\n"
    )
    return head.encode() + data + f"\r\n--{_BOUNDARY}--\r\n".encode()


_TRITON_HEADER = (
    '{{"inputs":[{{"name":"image","shape":[1,1],"datatype":"BYTES","parameters":{{"binary_data_size":{size}}}}}]}}'
)


def _triton(data: bytes) -> bytes:
    """KServe v2 with the binary tensor extension; the header is padded so that its length is the same for all."""
    header = _TRITON_HEADER.format(size=len(data) + 4).ljust(_TRITON_HEADER_BYTES)
    return header.encode() + len(data).to_bytes(4, "little") + data


_TRITON_HEADER_BYTES = 200


def _triton_top1(answer: bytes) -> int:
    outputs = {output["name"]: output["data"] for output in json.loads(answer)["outputs"]}
    return int(outputs["index"][0])


def _json(*path: str | int) -> Callable[[bytes], int]:
    def top1(answer: bytes) -> int:
        value: Any = json.loads(answer)
        for step in path:
            value = value[step]
        return int(value)

    return top1


def _same(data: bytes) -> bytes:
    return data


JPEG = {"Content-Type": "image/jpeg"}
FORM = {"Content-Type": f"multipart/form-data; boundary={_BOUNDARY}"}
OURS = Protocol("/classify", JPEG, _same, _json("predictions", 0, "index"))


def _peer(threads: int, decoders: int, wait: float, **more: object) -> dict[str, str]:
    named = {"THREADS": threads, "DECODERS": decoders, "WAIT_MS": wait, **more}
    return {f"PEER_{name}": str(value) for name, value in named.items()}


def _openvino(threads: int, decoders: int, wait: float, **more: object) -> dict[str, str]:
    return _peer(threads, decoders, wait, ENGINE="openvino", **more)


VITSERVE = Server(
    "vitserve",
    ("-m", "service", "serve"),
    OURS,
    "vitserve",
    candidates=[{}, {"VIT_COMPILE": "off"}],
    held=False,  # it polls nothing, and its watchdog ends a process that has stood still
)

SERVERS = [
    VITSERVE,
    Server(
        "FastAPI",
        ("-m", "benchmarks.peers.fastapi_app"),
        Protocol("/classify", JPEG, _same, _json("index")),
        "fastapi",
        candidates=[_peer(2, 2, 5), _peer(1, 1, 5, WORKERS=2, BATCH=8)],
        openvino=[_openvino(2, 2, 0, BATCH=8), _openvino(2, 2, 5), _openvino(2, 2, 0, BATCH=1, STREAMS=2)],
    ),
    Server(
        "LitServe",
        ("-m", "benchmarks.peers.litserve_app"),
        Protocol("/predict", FORM, _multipart, _json("index")),
        "litserve",
        "litserve",
        candidates=[_peer(1, 1, 5, WORKERS=2, BATCH=8), _peer(2, 2, 5)],
        openvino=[_openvino(1, 1, 5, WORKERS=2, BATCH=8), _openvino(2, 2, 5)],
    ),
    Server(
        "mosec",
        ("-m", "benchmarks.peers.mosec_app"),
        Protocol("/inference", JPEG, _same, _json("index")),
        "mosec",
        "mosec",
        candidates=[_peer(1, 0, 5, BATCH=8, WORKERS=2), _peer(1, 2, 5, BATCH=8, WORKERS=2), _peer(2, 2, 5, BATCH=16)],
        openvino=[
            _openvino(1, 0, 5, BATCH=8, WORKERS=2),
            _openvino(1, 2, 5, BATCH=8, WORKERS=2),
            _openvino(2, 2, 5, BATCH=16),
        ],
    ),
    Server(
        "Ray Serve",
        ("-m", "benchmarks.peers.ray_app"),
        Protocol("/", JPEG, _same, _json("index")),
        "ray",
        "ray",
        candidates=[_peer(2, 2, 20), _peer(1, 1, 5, WORKERS=2)],
        openvino=[_openvino(2, 2, 20), _openvino(1, 1, 5, WORKERS=2)],
        extra={"RAY_USAGE_STATS_ENABLED": "0"},
    ),
    Server(
        "BentoML",
        ("-m", "bentoml", "serve", "benchmarks.peers.bentoml_app:Service", "--host", "127.0.0.1", "--port", "{port}"),
        Protocol("/classify", FORM, _multipart, _json(0, "index")),
        "bentoml",
        "bentoml",
        candidates=[_peer(2, 2, 0, MAX_LATENCY_MS=60000), _peer(1, 1, 0, MAX_LATENCY_MS=60000, WORKERS=2)],
        openvino=[_openvino(2, 2, 0, MAX_LATENCY_MS=60000), _openvino(1, 1, 0, MAX_LATENCY_MS=60000, WORKERS=2)],
        extra={"BENTOML_DO_NOT_TRACK": "True", "BENTOML_HOME": str(PEERS / "bentoml" / "home")},
    ),
    Server(
        "Triton (pytriton)",
        ("-m", "benchmarks.peers.pytriton_app"),
        Protocol(
            "/v2/models/vit/infer",
            {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(_TRITON_HEADER_BYTES)},
            _triton,
            _triton_top1,
        ),
        "nvidia-pytriton",
        "pytriton",
        candidates=[_peer(2, 2, 5), _peer(2, 2, 0)],
        openvino=[_openvino(2, 2, 0, BATCH=8), _openvino(2, 2, 0)],
        # Triton's Python stub takes whatever libpython it finds first: it has to be this interpreter's.
        extra={"LD_LIBRARY_PATH": str(sysconfig.get_config_var("LIBDIR"))},
        held=False,  # it ends where its Python stub does not answer at once
    ),
]
"""The table of who is measured: ours first."""
