"""Make an environment for each peer under benchmarks/.peers: `python -m
benchmarks.peers.make_environments [NAME...]`.

Each is a virtual environment that falls back to the packages of this environment, because torch is
large. Peers with conflicting requirements then run on the same torch. If a peer cannot be
installed, its name is printed, and the others go on.
"""

import site
import subprocess
import sys
from pathlib import Path

from benchmarks.servers import PEERS, SERVERS

_REQUIREMENTS = Path(__file__).parent / "requirements"


def _make(name: str) -> bool:
    folder = PEERS / name
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", folder], check=True)
    [packages] = folder.glob("lib/python*/site-packages")
    (packages / "behind.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    pip = [
        str(folder / "bin" / "python"),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
    ]
    for file in sorted(_REQUIREMENTS.glob(f"{name}.*txt")):
        options = ["--no-deps"] if file.name.endswith(".no-deps.txt") else []
        if subprocess.run([*pip, *options, "-r", str(file)], check=False).returncode:
            return False
    return True


if __name__ == "__main__":
    known = [server.environment for server in SERVERS if server.environment is not None]
    failed = [name for name in sys.argv[1:] or known if not _make(name)]
    print(f"not installed: {', '.join(failed)}" if failed else "all are installed")
    sys.exit(len(failed))
