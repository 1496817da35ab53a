"""Make an environment for each peer under benchmarks/.peers: `python -m benchmarks.peers.make_environments [NAME...]`.

Each is a virtual environment that sees this one's packages behind its own (torch is large), so that peers with
requirements that contradict each other can be measured on the same torch. A peer that cannot be installed is
told, and the others go on.
"""

from __future__ import annotations

import site
import subprocess
import sys
import sysconfig
from pathlib import Path

from benchmarks.checkpoints import REPOSITORY
from benchmarks.servers import PEERS

_REQUIREMENTS = Path(__file__).parent / "requirements"


def main(names: list[str]) -> int:
    """Returns how many could not be made."""
    known = sorted({file.name.partition(".")[0] for file in _REQUIREMENTS.glob("*.txt")})
    failed = [name for name in names or known if not _make(name)]
    print(f"not installed: {', '.join(failed)}" if failed else "all are installed")
    return len(failed)


def _make(name: str) -> bool:
    folder = PEERS / name
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", folder], check=True)
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))
    (packages / "behind.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    files = sorted(_REQUIREMENTS.glob(f"{name}.*txt"))
    own = {line.partition("==")[0] for file in files for line in file.read_text().splitlines()}
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(line for line in lines if line.partition("==")[0] not in own))
    pip: list[Path | str] = [
        folder / "bin" / "python",
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
    ]
    for file in files:
        options: list[Path | str] = ["--no-deps"] if file.name.endswith(".no-deps.txt") else ["-c", constraints]
        if subprocess.run([*pip, *options, "-r", file], check=False).returncode:
            return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
