"""Load: closed loop by `wrk` (as many requests under way as connections), open loop by `benchmarks.openloop`.

A `Protocol` says how a server wants its picture; the load itself is the same for all.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_SCRIPT = """
local requests, turn = {}, 0
function init(args)
  local files = {%s}
  for i, name in ipairs(files) do
    local file = assert(io.open(name, "rb"))
    requests[i] = wrk.format("POST", %s, {%s}, file:read("*a"))
    file:close()
  end
end
function request()
  turn = turn %% #requests + 1
  return requests[turn]
end
function done(summary, latency, requests)
  io.write(string.format(
    "RESULT requests=%%d us=%%d status=%%d connect=%%d read=%%d write=%%d timeout=%%d" ..
    " p50=%%d p90=%%d p99=%%d max=%%d\\n",
    summary.requests, summary.duration, summary.errors.status, summary.errors.connect, summary.errors.read,
    summary.errors.write, summary.errors.timeout, latency:percentile(50), latency:percentile(90),
    latency:percentile(99), latency.max))
end
"""


@dataclass(frozen=True)
class Protocol:
    """How one server takes a picture and tells its best class.

    Attributes:
        path: of the POST.
        headers: of the POST, without Host and Content-Length.
        wrap: JPEG to body.
        top1: answer's body to the index of the best class.
    """

    path: str
    headers: dict[str, str]
    wrap: Callable[[bytes], bytes]
    top1: Callable[[bytes], int]


@dataclass(frozen=True)
class Load:
    """What the clients saw.

    Attributes:
        rate: requests answered 200, per second.
        p50, p90, p99, max: milliseconds until the answer.
        refused: answers with another status.
        broken: connections that failed, and requests without an answer.
    """

    rate: float
    p50: float
    p90: float
    p99: float
    max: float
    refused: int
    broken: int

    def as_json(self) -> dict[str, Any]:
        """For a record."""
        return {name: round(value, 3) if isinstance(value, float) else value for name, value in asdict(self).items()}


def parse_wrk(output: str) -> Load:
    """The `RESULT` line of our script.

    Raises:
        ValueError: there is none.
    """
    found = re.search(r"^RESULT (.*)$", output, re.MULTILINE)
    if found is None:
        raise ValueError(f"wrk gave no result:\n{output}")
    values = {name: int(value) for name, value in (pair.split("=") for pair in found[1].split())}
    answered = values["requests"] - values["status"]
    return Load(
        rate=answered / (values["us"] / 1e6),
        p50=values["p50"] / 1000,
        p90=values["p90"] / 1000,
        p99=values["p99"] / 1000,
        max=values["max"] / 1000,
        refused=values["status"],
        broken=values["connect"] + values["read"] + values["write"] + values["timeout"],
    )


def wrk_script(bodies: Sequence[Path], protocol: Protocol) -> str:
    """Lua that sends the bodies in turn."""
    headers = ", ".join(f"[{json.dumps(name)}] = {json.dumps(value)}" for name, value in protocol.headers.items())
    return _SCRIPT % (", ".join(json.dumps(str(body)) for body in bodies), json.dumps(protocol.path), headers)


class Loader:
    """Sends one picture set to a server; made by `loader`."""

    def __init__(self, folder: Path, bodies: Sequence[Path], protocol: Protocol) -> None:
        self._folder = folder
        self._bodies = bodies
        self._protocol = protocol
        self._script = folder / "load.lua"
        self._script.write_text(wrk_script(bodies, protocol))

    def closed(self, url: str, *, connections: int, seconds: float) -> Load:
        """`wrk` with one thread: each connection sends its next request when it has its answer."""
        # wrk measures whole seconds.
        whole = max(1, round(seconds))
        command = ["wrk", "-t1", f"-c{connections}", f"-d{whole}s", "--timeout", "30s", "-s", str(self._script), url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=whole + 60, check=True)
        return parse_wrk(done.stdout)

    def open(self, url: str, *, rate: float, seconds: float) -> Load:
        """Requests at moments that do not depend on the answers; latency counts from the moment planned."""
        plan = self._folder / "plan.json"
        plan.write_text(
            json.dumps(
                {
                    "url": url,
                    "path": self._protocol.path,
                    "headers": self._protocol.headers,
                    "bodies": [str(body) for body in self._bodies],
                    "rate": rate,
                    "seconds": seconds,
                }
            )
        )
        command = [sys.executable, "-m", "benchmarks.openloop", str(plan)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 90, check=True)
        return Load(**json.loads(done.stdout))


@contextmanager
def loader(pictures: Sequence[Path], protocol: Protocol) -> Iterator[Loader]:
    """The bodies of the pictures in a folder that lives as long as the context."""
    with tempfile.TemporaryDirectory(prefix="vitserve-bench-") as name:
        folder = Path(name)
        bodies = []
        for picture in pictures:
            body = folder / picture.with_suffix(".body").name
            body.write_bytes(protocol.wrap(picture.read_bytes()))
            bodies.append(body)
        yield Loader(folder, bodies, protocol)
