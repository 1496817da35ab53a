"""Clients of a running service that check every answer."""

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, Self

import httpx

from tests.e2e.serving import Pictures, Served, client, problem
from tests.launcher import PATIENCE, until


def connection(server: Served) -> httpx.Client:
    return client(server.url)


class Load:
    """Callers that send requests without a pause, check each answer, and reconnect.

    Args:
        check: function that returns the outcome of a picture's answer, or raises `AssertionError`.
        pause: seconds between two requests of a caller.

    Attributes:
        outcomes: counts of outcomes of `check`, of `lost` connections, and of codes of problems.
    """

    def __init__(
        self,
        server: Served,
        pictures: Pictures,
        check: Callable[[int, dict[str, Any]], str] | None = None,
        *,
        callers: int = 8,
        pause: float = 0.0,
    ) -> None:
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[object] = []
        self._server = server
        self._pictures = pictures
        self._check = check
        self._pause = pause
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, args=(number,)) for number in range(callers)
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()

    def _run(self, number: int) -> None:
        while not self._stop.is_set():
            with connection(self._server) as own:
                try:
                    while not self._stop.wait(self._pause):
                        number += 7
                        self._count(self._ask(own, number))
                except httpx.TransportError:  # the worker on the other end has ended
                    self._count("lost")
                except (AssertionError, KeyError) as error:
                    self.wrong.append(error)
                    return

    def _ask(self, own: httpx.Client, number: int) -> str:
        index = number % len(self._pictures)
        query = f"top_k=7&attention={str(number % 3 == 0).lower()}"
        answer = own.post(f"/classify?{query}", content=self._pictures.files[index])
        if answer.status_code != 200:
            status, code = problem(answer)
            assert status == 503
            self._stop.wait(0.1)  # like a client that obeys Retry-After
            return code
        if self._check is not None:
            return self._check(index, answer.json())
        self._pictures.check(index, answer.json())
        return "answered"

    def _count(self, outcome: str) -> None:
        with self._lock:
            self.outcomes[outcome] += 1

    def until(self, condition: Callable[[Counter[str]], bool]) -> None:
        until(lambda: bool(self.wrong) or condition(self.outcomes))

    def more(self, outcome: str = "answered", count: int = 30) -> None:
        """Wait for `count` further answers with this outcome."""
        goal = self.outcomes[outcome] + count
        self.until(lambda outcomes: outcomes[outcome] >= goal)

    def stop(self) -> Counter[str]:
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE)
        assert self.wrong == []
        return self.outcomes
