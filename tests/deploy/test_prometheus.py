"""Prometheus' rules: their unit tests, their runbook, and that each alert is tested."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import Any

import pytest

from tests.conftest import REPOSITORY
from tests.strict_yaml import load_documents

RULES = REPOSITORY / "deploy/prometheus/rules"
TESTS = REPOSITORY / "tests/deploy/prometheus/alerts.test.yml"
(ALERT_FILE,) = load_documents(RULES / "alerts.yml")
ALERTS: list[dict[str, Any]] = [rule for group in ALERT_FILE["groups"] for rule in group["rules"]]


@pytest.mark.parametrize("arguments", [["check", "rules", *sorted(RULES.glob("*.yml"))], ["test", "rules", TESTS]])
def test_promtool_accepts_the_rules_and_their_tests(arguments: list[str]) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (it comes with Prometheus)")
    done = subprocess.run([promtool, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_seen_to_fire_and_not_to_fire() -> None:
    (document,) = load_documents(TESTS)
    cases = [case for test in document["tests"] for case in test.get("alert_rule_test", ())]
    for alert in ALERTS:
        expected = [bool(case["exp_alerts"]) for case in cases if case["alertname"] == alert["alert"]]
        assert True in expected, alert["alert"]
        assert False in expected, alert["alert"]


def test_the_docs_say_what_to_do_for_each_alert_and_for_no_other() -> None:
    section = (REPOSITORY / "docs/metrics.md").read_text().split("\n## Alerts\n")[1].split("\n## ")[0]
    assert sorted(re.findall(r"`(Vitserve\w+)`", section)) == sorted(alert["alert"] for alert in ALERTS)
    for alert in ALERTS:
        assert alert["annotations"]["runbook"] == "docs/metrics.md#alerts"
        assert alert["labels"]["severity"] in {"page", "ticket"}
