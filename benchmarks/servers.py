"""Servers under test: how each is started, asked and stopped. One class, one table."""

import contextlib
import functools
import json
import operator
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

from benchmarks.checkpoints import REPOSITORY
from benchmarks.load import Protocol

PEERS = REPOSITORY / "benchmarks" / ".peers"
_MARK = "VITSERVE_BENCHMARK"
# Until a server has computed what its callers no longer wait for.
_DRAIN_SECONDS = 0.6

# Environment variables that configure a server.
Config = Mapping[str, str]


@dataclass(frozen=True)
class Server:
    """One way to serve.

    Attributes:
        command: python's arguments; `{port}` is filled in.
        environment: folder of the environment under `.peers`; None for this environment.
        distribution: package whose version the record names.
        configs: measured configurations by name; for a peer, the fastest of several on two cores:
            see `tune` in results/peers.json.
        extra: environment that every configuration has.
        held: whether it may be stopped (SIGSTOP) while another server is measured.
    """

    name: str
    command: Sequence[str]
    protocol: Protocol
    distribution: str
    environment: str | None = None
    configs: Mapping[str, Config] = field(default_factory=dict)
    extra: Config = field(default_factory=dict)
    held: bool = True

    @property
    def python(self) -> Path:
        """The interpreter that runs it."""
        return (
            Path(sys.executable)
            if self.environment is None
            else PEERS / self.environment / "bin" / "python"
        )

    def version(self) -> str:
        """Return the version of the distribution.

        Raises:
            OSError, subprocess.CalledProcessError: it is not installed.
        """
        code = f"import importlib.metadata as m; print(m.version({self.distribution!r}))"
        return subprocess.run(
            [self.python, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()


class Running:
    """A started server, with a port of its own on this machine.

    Args:
        config: its environment, in addition to the environment of every server; `VIT_*` variables
            of this process are left out.

    Attributes:
        answer_seconds: until it answered first.
        start_seconds: until it answered, and had compiled.
    """

    answer_seconds = 0.0
    start_seconds = 0.0

    def __init__(self, server: Server, config: Config) -> None:
        port = str(free_port())
        mark = uuid.uuid4().hex
        self.url = f"http://127.0.0.1:{port}"
        self._mark = f"{_MARK}={mark}".encode()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  `stop` closes it
        self._command = [str(server.python), *(part.format(port=port) for part in server.command)]
        own = {name: value for name, value in os.environ.items() if not name.startswith("VIT_")}
        self._environment = own | {
            "PYTHONPATH": os.pathsep.join(
                filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH")))
            ),
            # Threads of OpenMP that spin between operators starve whatever else runs on the same
            # cores.
            "OMP_WAIT_POLICY": "PASSIVE",
            "PEER_PORT": port,
            "VIT_PORT": port,
            "VIT_LOG_LEVEL": "warning",
            _MARK: mark,
            **server.extra,
            **config,
            # What was set by hand wins, so that a peer can be tuned: PEER_THREADS=8 python -m
            # benchmarks.peers
            **{name: value for name, value in os.environ.items() if name.startswith("PEER_")},
        }
        self.launch()

    def launch(self) -> None:
        """Start it, or start it again where it has ended."""
        self.process = subprocess.Popen(
            self._command,
            cwd=REPOSITORY,
            env=self._environment,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def log_end(self) -> str:
        """Return the end of the log."""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), 3000, max(0, size - 3000)).decode(errors="replace")

    def pids(self) -> list[int]:
        """Return all processes of this server: they inherit its mark, including daemons."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if self._mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
        return sorted(found)

    @contextmanager
    def thawed(self, *, held: bool) -> Iterator[None]:
        """Let all of its processes run, then hold them: some servers poll while idle, and take a
        fifth of a core.
        """
        self._signal(signal.SIGCONT)
        yield
        if held:
            # A batch that was held half-way would count as a slow one: BentoML then refuses for
            # fear of the next.
            time.sleep(_DRAIN_SECONDS)
            self._signal(signal.SIGSTOP)

    def processor_seconds(self) -> float:
        """User and system time of its processes, all their threads included (proc(5))."""
        stats = [
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in self.pids()
        ]
        return sum(int(stat[11]) + int(stat[12]) for stat in stats) / os.sysconf("SC_CLK_TCK")

    def _signal(self, number: signal.Signals) -> None:
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def stop(self) -> int:
        """SIGTERM, then SIGKILL for whatever of it is left after a while; return the exit code."""
        self._signal(signal.SIGCONT)
        self.process.terminate()
        deadline = time.monotonic() + 20
        while (self.process.poll() is None or self.pids()) and time.monotonic() < deadline:
            time.sleep(0.1)
        self._signal(signal.SIGKILL)
        self._log.close()
        return self.process.wait(15)


@contextmanager
def running(
    server: Server, model: Path, config: Config, *, picture: bytes, timeout: float = 120
) -> Iterator[Running]:
    """Start a server, wait until it answers, stop it with all its processes.

    Args:
        model: folder of the checkpoint.
        config: one of the server's candidates.
        picture: JPEG that it has to classify to count as ready.
        timeout: seconds until it must be ready.

    Raises:
        RuntimeError: it ended, or was not ready in time; the message holds the end of its log.
    """
    started = time.monotonic()
    found = Running(server, {"PEER_MODEL": str(model), "VIT_CHECKPOINT": str(model), **config})
    try:
        while not (_answers(server, found, picture, started) and _is_compiled(server, found.url)):
            if found.process.poll() is not None or time.monotonic() > started + timeout:
                raise RuntimeError(
                    f"{server.name} was not ready after {timeout:g} s or has ended:\n"
                    f"{found.log_end()}"
                )
            time.sleep(0.02)
        found.start_seconds = time.monotonic() - started
        yield found
    finally:
        found.stop()


def _answers(server: Server, found: Running, picture: bytes, started: float) -> bool:
    """Whether it answers; notes when it did first."""
    try:
        ask(found.url, server.protocol, picture)
    except (OSError, ValueError, KeyError):
        return False
    found.answer_seconds = found.answer_seconds or time.monotonic() - started
    return True


def _is_compiled(server: Server, url: str) -> bool:
    """Whether it has compiled: vitserve does that on a thread while it already answers."""
    if server.distribution != "vitserve":
        return True
    try:
        with urllib.request.urlopen(f"{url}/model", timeout=10) as answer:
            return not str(json.load(answer)["compiled"]).startswith("compiling")
    except (OSError, ValueError, KeyError):
        return False


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
    total = 0
    pids = [pid]
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


def _json(*path: str | int) -> Callable[[bytes], int]:
    return lambda answer: int(functools.reduce(operator.getitem, path, json.loads(answer)))


def _form(path: str, *answer: str | int) -> Protocol:
    """A multipart form with a file."""
    head = b'--picture\r\nContent-Disposition: form-data; name="file"; filename="a.jpg"\r\n\r\n'
    headers = {"Content-Type": "multipart/form-data; boundary=picture"}
    return Protocol(
        path, headers, lambda data: head + data + b"\r\n--picture--\r\n", _json(*answer)
    )


def _raw(path: str, *answer: str | int) -> Protocol:
    """The JPEG is the body."""
    return Protocol(path, {"Content-Type": "image/jpeg"}, bytes, _json(*answer))


_TENSOR = (
    '{"inputs":[{"name":"image","shape":[1,1],"datatype":"BYTES",'
    '"parameters":{"binary_data_size":%d}}]}'
)
_HEADER_BYTES = 200


def _tensor(path: str, *answer: str | int) -> Protocol:
    """KServe v2 with the binary tensor extension; the header is padded so that its length is the
    same for all.
    """
    headers = {
        "Content-Type": "application/octet-stream",
        "Inference-Header-Content-Length": str(_HEADER_BYTES),
    }

    def wrap(data: bytes) -> bytes:
        header = (_TENSOR % (len(data) + 4)).ljust(_HEADER_BYTES)
        return header.encode() + len(data).to_bytes(4, "little") + data

    return Protocol(path, headers, wrap, _json(*answer))


OURS = _raw("/classify", "predictions", 0, "index")


def _peer(threads: int, decoders: int, wait: float, **more: object) -> Config:
    named = {"THREADS": threads, "DECODERS": decoders, "WAIT_MS": wait, **more}
    return {f"PEER_{name}": str(value) for name, value in named.items()}


_TWO_WORKERS = {
    "torch": _peer(1, 1, 5, WORKERS=2, BATCH=8),
    "openvino": _peer(1, 1, 5, WORKERS=2, BATCH=8),
}

VITSERVE = Server(
    "vitserve",
    ("-m", "service", "serve"),
    OURS,
    "vitserve",
    configs={"openvino": {}, "torch": {"VIT_COMPILE": "off"}},
    held=False,  # it does not poll, and its watchdog ends a stopped process
)

# The table of who is measured: ours first. The first word of a configuration is the peer's engine.
SERVERS = [
    VITSERVE,
    Server(
        "FastAPI",
        ("-m", "benchmarks.peers.fastapi_app"),
        _raw("/classify", "index"),
        "fastapi",
        configs={
            "torch": _peer(2, 2, 5),
            "torch, two": _TWO_WORKERS["torch"],
            "openvino": _peer(2, 2, 0, BATCH=8),
        },
    ),
    Server(
        "LitServe",
        ("-m", "benchmarks.peers.litserve_app"),
        _form("/predict", "index"),
        "litserve",
        "litserve",
        configs=_TWO_WORKERS,
    ),
    Server(
        "mosec",
        ("-m", "benchmarks.peers.mosec_app"),
        _raw("/inference", "index"),
        "mosec",
        "mosec",
        configs={**_TWO_WORKERS, "compile": _TWO_WORKERS["torch"]},
    ),
    Server(
        "Ray Serve",
        ("-m", "benchmarks.peers.ray_app"),
        _raw("/", "index"),
        "ray",
        "ray",
        configs={"torch": _peer(2, 2, 20), "openvino": _peer(2, 2, 20)},
        extra={"RAY_USAGE_STATS_ENABLED": "0"},
    ),
    Server(
        "BentoML",
        (
            "-m",
            "bentoml",
            "serve",
            "benchmarks.peers.bentoml_app:Service",
            "--host",
            "127.0.0.1",
            "--port",
            "{port}",
        ),
        _form("/classify", 0, "index"),
        "bentoml",
        "bentoml",
        configs={"torch": _peer(2, 2, 0), "openvino": _peer(2, 2, 0)},
        extra={"BENTOML_DO_NOT_TRACK": "True", "BENTOML_HOME": str(PEERS / "bentoml" / "home")},
    ),
    Server(
        "Triton (pytriton)",
        ("-m", "benchmarks.peers.pytriton_app"),
        _tensor("/v2/models/vit/infer", "outputs", 0, "data", 0),
        "nvidia-pytriton",
        "pytriton",
        configs={"torch": _peer(2, 2, 5), "openvino": _peer(2, 2, 0, BATCH=8)},
        # Triton's Python stub takes whatever libpython it finds first: it has to be this
        # interpreter's.
        extra={"LD_LIBRARY_PATH": str(sysconfig.get_config_var("LIBDIR"))},
        held=False,  # it ends where its Python stub does not answer at once
    ),
]
