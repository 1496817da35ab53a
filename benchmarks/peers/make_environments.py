"""Make an environment for each peer under benchmarks/.peers: `python -m benchmarks.peers.make_environments [NAME...]`.

Each is a virtual environment that sees this one's packages behind its own (torch is large), so that peers with
requirements that contradict each other can be measured on the same torch. A peer that cannot be installed is
told, and the others go on.
"""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from benchmarks.checkpoints import REPOSITORY
from benchmarks.servers import PEERS

_REQUIREMENTS = Path(__file__).parent / "requirements"


def main(names: list[str]) -> int:
    """Returns how many could not be made."""
    known = sorted({file.name.partition(".")[0] for file in _REQUIREMENTS.glob("*.txt")})
    failed = [name for name in names or known if not _make(name)]
    if failed:
        print(f"not installed: {', '.join(failed)}")
    if shutil.which("wrk") is None:
        print("wrk, which makes the load, is not on the PATH: apt-get install wrk")
    return len(failed)


def _make(name: str) -> bool:
    folder = PEERS / name
    stamp = folder / ".made"
    files = sorted(_REQUIREMENTS.glob(f"{name}*.txt"))
    wanted = "".join(file.read_text() for file in files)
    if stamp.exists() and stamp.read_text() == wanted:
        return True
    print(f"{name} ...", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", folder], check=True)
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))
    (packages / "behind.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    with tempfile.TemporaryDirectory() as temporary:
        constraints = Path(temporary) / "constraints.txt"
        own = {line.partition("==")[0] for line in wanted.splitlines()}
        lines = (REPOSITORY / "constraints.txt").read_text().splitlines(keepends=True)
        constraints.write_text("".join(line for line in lines if line.partition("==")[0] not in own))
        for file in files:
            options = ["--no-deps"] if file.name.endswith(".no-deps.txt") else ["-c", str(constraints)]
            command = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", *options, "-r", str(file)]
            environment = os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"}
            if subprocess.run(command, env=environment, check=False).returncode:
                return False
    stamp.write_text(wanted)
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
