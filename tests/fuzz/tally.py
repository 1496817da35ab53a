"""What was sent and what came back, as one table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

EXPECTED = {501, 503, 504, 505}
"""Server errors that refuse: a coding or a version that is not spoken, no room, no time."""

_SHOWN = 10


@dataclass
class Tally:
    """The cases of one kind.

    Attributes:
        sent: requests, or streams of them.
        statuses: of the answers; interim ones (100) are not counted.
        lost: whole requests without a whole answer.
        growth: bytes of memory that the server had more afterwards.
        seconds, peak: processor time and growth of the memory at the most costly file, where each is measured.
        faults: what was wrong, by case; a lost answer and an unexpected status are among them.
        notes: what is worth to be looked at and no fault.
    """

    kind: str
    sent: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    lost: int = 0
    growth: int = 0
    seconds: float = 0.0
    peak: int = 0
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def answered(self, status: int, case: object) -> bool:
        """Count an answer, and return whether it is none of the unexpected server errors, which are faults."""
        self.statuses[status] += 1
        good = status < 500 or status in EXPECTED
        if not good:
            self.faults.append(f"{self.kind} {case}: {status}")
        return good

    def lose(self, case: object, reason: object) -> None:
        """Count a request without an answer."""
        self.lost += 1
        self.faults.append(f"{self.kind} {case}: lost: {reason}")

    @property
    def cells(self) -> list[str]:
        classes = [_within(self.statuses, start, start + 100) for start in (200, 300, 400)]
        refused = sum(self.statuses[status] for status in EXPECTED)
        failed = _within(self.statuses, 500, 600) - refused
        costs = [f"{self.seconds:.2f}", f"{self.peak / 2**20:+.0f}"] if self.seconds else ["", ""]
        counts = map(str, (self.sent, *classes, refused, failed, self.lost))
        return [self.kind, *counts, f"{self.growth / 2**20:+.1f}", *costs]


def table(tallies: Iterable[Tally]) -> str:
    """Return the table with a line for each kind, and the first faults below it."""
    tallies = list(tallies)
    names = [
        "kind",
        "sent",
        "2xx",
        "3xx",
        "4xx",
        "501 503-505",
        "other 5xx",
        "lost",
        "RSS MiB",
        "CPU-s a file",
        "MiB a file",
    ]
    rows = [names, *(tally.cells for tally in tallies)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if at else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    for tally in tallies:
        lines += tally.faults[:_SHOWN]
        if len(tally.faults) > _SHOWN:
            lines.append(f"{tally.kind}: {len(tally.faults) - _SHOWN} faults more")
        lines += [f"no fault, but amplified: {note}" for note in tally.notes[:_SHOWN]]
    return "\n".join(lines)


def _within(statuses: Counter[int], start: int, stop: int) -> int:
    return sum(count for status, count in statuses.items() if start <= status < stop)
