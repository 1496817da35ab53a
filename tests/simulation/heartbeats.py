"""Processes that stand still, as after SIGSTOP: they are noticed by their heartbeats, and killed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from service.http.watchdog import Pulse
from tests.simulation.scheduler import Process

if TYPE_CHECKING:
    from tests.simulation.world import World

_LOOK_SECONDS = 1.0
_NOTICED_WITHIN = 5.0
_FOR_GOOD = 60.0


class Heartbeats:
    """Freezes processes, and does the part of the supervisor that looks at the beats of each."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._pulses: dict[Process, Pulse] = {}

    def start(self) -> None:
        """Look at all processes from now on."""
        if self._world.channels:
            self._world.scheduler.after(_LOOK_SECONDS, self._look)

    def freeze(self, process: Process, seconds: float) -> None:
        """Let a process and its threads stand still for some seconds, or, if that is 0, until it is killed."""
        now = self._world.scheduler.now
        if process.alive and process.frozen_until <= now:
            process.frozen_at, process.frozen_until = now, now + (seconds or _FOR_GOOD)

    def any_frozen(self) -> bool:
        """Return whether a process stands still."""
        now = self._world.scheduler.now
        return any(process.frozen_until > now for process, *_ in self._living())

    def _living(self) -> Iterator[tuple[Process, bool, int]]:
        """Yield each worker and engine that lives, with whether it is an engine, and its heartbeats."""
        world = self._world
        for worker in world.workers:
            if worker.process.alive:
                yield worker.process, False, int(world.counters.worker_beats[worker.number])
        for index, engine in world.engines.items():
            if engine.alive:
                yield engine, True, int(world.counters.engine_beats[index])

    def _look(self) -> None:
        world, now = self._world, self._world.scheduler.now
        world.scheduler.after(_LOOK_SECONDS, self._look)
        for process, is_engine, beats in list(self._living()):
            starting = is_engine and not world.counters.engine_ready[process.index]
            pulse = self._pulses.setdefault(process, Pulse())
            # Nobody here works without a beat, so the processor time may stand still.
            if pulse.is_frozen(now, beats, 0.0, starting=bool(starting)):
                world.scheduler.note(process.name, "is frozen, and killed")
                if process.frozen_until <= now:
                    world.scheduler.violate(f"{process.name} is killed, though it works")
                if is_engine:
                    world.kill_engine(process.index)
                else:
                    world.workers[process.index].kill()
            elif process.frozen_until > now > process.frozen_at + _NOTICED_WITHIN:
                world.scheduler.violate(f"{process.name} has been frozen for long, and nobody notices")
