"""mosec: processes that decode and compute a batch each, so that nothing goes from process to
process but files.
"""

import sys
from typing import Any

from mosec import Server, Worker

from benchmarks.peers.common import FileClassifier, Options


class Whole(Worker):
    """The worker of the only stage."""

    def __init__(self) -> None:
        self.classifier = FileClassifier()

    def deserialize(self, data: bytes) -> bytes:
        """The body as it is."""
        return data

    def forward(self, data: list[bytes]) -> list[dict[str, Any]]:
        """One batch."""
        return self.classifier(data)


if __name__ == "__main__":
    options = Options()
    # mosec reads its own settings from the command line.
    sys.argv[1:] = (
        f"--address 127.0.0.1 --port {options.port} --timeout 30000 --log-level warning".split()
    )
    server = Server()
    wait = max(1, int(options.wait_ms))
    server.append_worker(
        Whole, num=options.workers, max_batch_size=options.batch, max_wait_time=wait
    )
    server.run()
