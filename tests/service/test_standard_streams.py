"""A process that is started without standard streams."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import os, socket, sys
from service.cli.main import open_standard_streams
open_standard_streams()
with socket.socket() as opened:
    assert opened.fileno() > 2
assert all(os.readlink(f"/proc/self/fd/{number}") == "/dev/null" for number in (0, 2))
print("an error", file=sys.stderr)
print("fine")
"""


def test_a_closed_stream_leads_nowhere_and_its_number_is_not_given_to_a_socket() -> None:
    shell = ["sh", "-c", 'exec "$0" -c "$1" 0<&- 2>&-', sys.executable, SCRIPT]
    done = subprocess.run(shell, stdout=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "fine\n")
