"""Groups of classes that taught heads are measured on."""

from itertools import combinations

from benchmarks.teach_groups import CHOICE, REPORTED


def test_groups_of_a_set_are_disjoint() -> None:
    for groups in (*REPORTED.values(), *CHOICE.values()):
        for one, other in combinations(groups.values(), 2):
            assert not one & other


def test_groups_to_choose_on_are_unreported() -> None:
    reported = {name for groups in REPORTED.values() for names in groups.values() for name in names}
    for groups in CHOICE.values():
        for names in groups.values():
            assert not names & reported
