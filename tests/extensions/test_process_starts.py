"""Processes of extensions are started by the helper, or by the supervisor."""

from tests.service.process_starts import files_that_start_processes


def test_only_a_supervisor_starts_processes() -> None:
    starters = files_that_start_processes("service/extensions", "model/extensions")
    # Its children are the service.
    assert starters == {"service/extensions/cluster/processes.py"}
