"""Mutants are small, valid, named by their change, and judged by the tests that enter the function they are in."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from tests.mutants.__main__ import EQUIVALENT, ROOT, equivalent
from tests.mutants.coverage import Entered, Recorder, _function_of, selected
from tests.mutants.mutations import Mutant, iterate, mutants
from tests.mutants.runner import mirrored_tests

MODULE = '''"""A text."""

LIMIT = 3


class Box:
    """A text."""

    def holds(self, count: int = 0) -> bool:
        """A text with 3 words."""
        assert count >= 0
        if count > LIMIT and not self.full:
            raise ValueError(f"more than {3}")
        return (count) + 1 <= max(LIMIT, 2)
'''


@pytest.fixture
def made(tmp_path: Path) -> list[Mutant]:
    (tmp_path / "box.py").write_text(MODULE)
    return mutants(tmp_path / "box.py", tmp_path)


def test_each_mutant_changes_one_place_of_the_code_that_does_something(made):
    assert [(mutant.function, mutant.after) for mutant in made] == [
        ("<module>", "LIMIT = 4"),
        ("Box.holds", "def holds(self, count: int = 1) -> bool:"),
        ("Box.holds", "if (not (count > LIMIT and not self.full)):"),
        ("Box.holds", "if count >= LIMIT and not self.full:"),
        ("Box.holds", "if count > LIMIT or not self.full:"),
        ("Box.holds", "if count > LIMIT and self.full:"),
        ("Box.holds", "pass"),
        ("Box.holds", "return None"),
        ("Box.holds", "return (count) - 1 <= max(LIMIT, 2)"),
        ("Box.holds", "return (count) + 2 <= max(LIMIT, 2)"),
        ("Box.holds", "return (count) + 1 < max(LIMIT, 2)"),
        ("Box.holds", "return (count) + 1 <= min(LIMIT, 2)"),
        ("Box.holds", "return (count) + 1 <= max(LIMIT, 3)"),
    ]
    assert [mutant.line for mutant in made[:3]] == [3, 9, 12]


def test_a_mutant_is_the_module_but_for_its_change(made):
    for mutant in made:
        assert mutant.valid
        lines, changed = MODULE.splitlines(), mutant.source.decode().splitlines()
        assert [line.strip() for line in lines if line not in changed] == [mutant.before]
        assert [line.strip() for line in changed if line not in lines] == [mutant.after]


def test_imports_for_annotations_alone_are_left_alone(tmp_path: Path):
    (tmp_path / "box.py").write_text("if TYPE_CHECKING:\n    import lid\n")
    assert mutants(tmp_path / "box.py", tmp_path) == []


def test_what_is_generated_has_no_mutants(tmp_path: Path):
    for name in ("box.py", "box_pb2.py"):
        (tmp_path / name).write_text(MODULE)
    assert {mutant.path for mutant in iterate([tmp_path], tmp_path)} == {"box.py"}


def test_tests_mirror_the_packages():
    assert mirrored_tests("service/engine/batching.py", ROOT) == Path("tests/service/engine")
    assert mirrored_tests("model/images/formats/gif.py", ROOT) == Path("tests/model/images")
    with pytest.raises(ValueError, match="mirrors"):
        mirrored_tests("examples/x.py", ROOT)


def test_tests_that_enter_the_function_are_run_and_the_likeliest_first():
    inside, module, elsewhere = {("a.py", "f")}, {("a.py", "g")}, {("b.py", "f")}
    tests = {
        "slow": Entered(inside, 2.0),
        "quick": Entered(inside, 1.0),
        "killer": Entered(inside, 3.0),
        "flaky": Entered(inside, 0.1, failed=True),
        "module": Entered(module, 0.1),
        "elsewhere": Entered(elsewhere, 0.1),
        "process": Entered(set(), 5.0),
    }
    assert selected(tests, "a.py", "f", Counter(killer=1)) == ["killer", "quick", "slow", "process"]
    everyone = ["module", "quick", "slow", "killer", "elsewhere", "process"]
    assert selected(tests, "a.py", "<module>", Counter()) == everyone
    assert sorted(selected(tests, "constants.py", "<module>", Counter())) == sorted(everyone)


@pytest.mark.parametrize(
    ("qualified", "function"),
    [
        ("Box.holds", "Box.holds"),
        ("Box.holds.<locals>.<genexpr>", "Box.holds"),
        ("f.<locals>.g.<locals>.<lambda>", "f.g"),
        ("Box.<lambda>", "Box.<lambda>"),
        ("<module>", ""),
    ],
)
def test_code_belongs_to_the_function_around_it_but_a_default_to_no_class(qualified, function):
    assert _function_of(qualified) == function


def test_the_body_of_a_class_is_credited_to_no_test():
    def function():
        return sys._getframe()

    class Body:
        frame = sys._getframe()

    recorder = Recorder(ROOT, ["tests"])
    recorder._current = entered = Entered()
    recorder._enter(Body.frame, "call", None)
    assert not entered.functions
    recorder._enter(function(), "call", None)
    assert {name.rpartition(".")[2] for _, name in entered.functions} == {"function"}


def test_calls_are_watched_again_after_a_test_in_which_python_gave_it_up():
    recorder = Recorder(ROOT, ["tests"])
    before = sys.gettrace()
    sys.settrace(None)
    try:
        next(recorder.pytest_runtest_protocol(cast(pytest.Item, SimpleNamespace(nodeid="a test"))))
        assert sys.gettrace() == recorder._enter
    finally:
        sys.settrace(before)


def test_equivalent_mutants_exist_and_each_has_its_reason():
    known = equivalent()
    existing = {mutant.key for mutant in iterate([ROOT / path for path in {key[0] for key in known}], ROOT)}
    for key, reason in known.items():
        assert key in existing, f"{EQUIVALENT.name}: no such mutant any more: {key}"
        assert len(reason) > 20


RUN = """
import sys
from pathlib import Path
from tests.mutants.mutations import mutants
from tests.mutants.runner import Runner

root = Path(sys.argv[1])
for mutant, verdict in Runner(root, jobs=1).run(mutants(root / "model/limits.py", root)):
    print(f"{mutant.after}: {verdict.value}")
"""


@pytest.mark.timeout(120)  # it starts pytest four times
@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_a_mutant_that_tests_notice_is_killed_and_another_survives(tmp_path):
    module = "def over(count):\n    return count > 3\n"
    for name, content in {
        "model/limits.py": module,
        "tests/model/test_limits.py": "from model.limits import over\n\n\ndef test_over():\n    assert over(9)\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)

    done = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=True
    )

    assert done.stdout.splitlines() == [
        "return None: killed",
        "return count >= 3: survived",
        "return count > 4: survived",
    ]
    assert (tmp_path / "model/limits.py").read_text() == module
