"""The service's invariants hold for every seed, and the simulator sees it when they do not."""

from __future__ import annotations

import os

import pytest

from tests.simulation import cluster_mutants, engine_mutants
from tests.simulation.engine_mutants import Mutant
from tests.simulation.runner import run_in_processes, run_range
from tests.simulation.scenario import scenario_of
from tests.simulation.world import run_seed

SEEDS = int(os.environ.get("SIMULATED_SEEDS", "3000"))
MOST_SEEDS_FOR_A_MUTANT = 5000


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_invariant_holds_for_every_seed() -> None:
    neighbours = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    assert run_in_processes(range(SEEDS), max(1, (os.cpu_count() or 1) // neighbours)) == []


@pytest.mark.parametrize("seed", [3, 17, 342])
def test_a_seed_replays_exactly(seed: int) -> None:
    first, again = (run_seed(seed, trace=True) for _ in range(2))
    assert len(first[1]) > 10
    assert first == again


def test_a_seed_that_fails_is_reported_with_the_command_that_replays_it(monkeypatch: pytest.MonkeyPatch) -> None:
    engine_mutants.permit_kept_on_error(monkeypatch)
    (failure,) = run_range([0])
    assert failure.startswith("python -m tests.simulation --seed 0: at ")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("mutant", engine_mutants.MUTANTS + cluster_mutants.MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_fault_is_found(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    eventful = (seed for seed in range(MOST_SEEDS_FOR_A_MUTANT) if len(scenario_of(seed).faults) > 1)
    assert any(run_seed(seed)[0] is not None for seed in eventful)
