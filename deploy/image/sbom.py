"""Adds what is not a Python package to an image's SBOM: `python sbom.py SBOM DPKG`, in the image's build.

`cyclonedx-py` lists the Python packages of an environment. DPKG is a copy of the image's /var/lib/dpkg, whose packages
are added, and so is Python itself. The SBOM is replaced, after it was validated against the schema of its version.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
from pathlib import Path
from typing import Any

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL


def debian_components(dpkg: Path, distribution: str) -> list[dict[str, str]]:
    """Return a component for each Debian package that is installed according to dpkg's folder.

    Raises:
        subprocess.CalledProcessError: dpkg-query cannot read the folder.
    """
    form = "${db:Status-Status} ${Package} ${Version} ${Architecture}\n"
    command = ["dpkg-query", f"--admindir={dpkg}", "--show", f"--showformat={form}"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    installed = [line.split()[1:] for line in lines if line.startswith("installed ")]
    return [
        component(PackageURL("deb", "debian", name, version, {"arch": architecture, "distro": distribution}))
        for name, version, architecture in installed
    ]


def component(url: PackageURL) -> dict[str, str]:
    """Return the component of a package URL, which is its reference too."""
    text = url.to_string()
    return {"type": "library", "bom-ref": text, "name": url.name, "version": url.version or "", "purl": text}


def main() -> None:
    """Complete the SBOM that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sbom", type=Path)
    parser.add_argument("dpkg", type=Path)
    arguments = parser.parse_args()
    release = platform.freedesktop_os_release()
    document: dict[str, Any] = json.loads(arguments.sbom.read_text())
    document["components"] += debian_components(arguments.dpkg, f"{release['ID']}-{release['VERSION_ID']}")
    document["components"].append(component(PackageURL("generic", None, "python", platform.python_version())))
    text = json.dumps(document, indent=1)
    error = JsonStrictValidator(SchemaVersion.from_version(document["specVersion"])).validate_str(text)
    if error is not None:
        raise SystemExit(f"{arguments.sbom}: not a valid SBOM: {error}")
    arguments.sbom.write_text(text)


if __name__ == "__main__":
    main()
