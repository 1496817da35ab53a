"""Check that settings, metrics, files and links in the documents exist."""

import re
import tomllib
from pathlib import Path

import pytest

from service.engine.messages import EngineStatus
from service.observe.gpus import GAUGES
from service.observe.metrics import Metrics
from service.observe.state import Sources
from service.settings import ENV_PREFIX, settings_class
from tests.conftest import REPOSITORY
from tests.service.web.apps import app, inside

# CHANGELOG.md may name settings, metrics and files of earlier versions.
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/*.md", "deploy/**/*.yml")
    for path in REPOSITORY.glob(pattern)
    if path.name != "CHANGELOG.md"
)
PAGES = [path for path in DOCUMENTS if path.is_relative_to(REPOSITORY / "docs")]
DECISIONS = [path for path in PAGES if path.parent.name == "decisions"]
README_WORDS = 1_300
DOCS_WORDS = 18_600
"""The pages of docs/, without the decisions."""
DECISION_WORDS = 300
STATUS = EngineStatus(
    device="cpu", state="loading", reason="", compiled="off", batch_sizes=None, queue_depth=0
)
_SAMPLES = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}


@pytest.fixture(scope="module")
def metric_names() -> set[str]:
    metrics = Metrics()
    metrics.watch(Sources(lambda: [STATUS]))
    families = list(metrics.registry.collect())
    return {*GAUGES, *(family.name for family in families)} | {
        family.name + suffix for family in families for suffix in _SAMPLES.get(family.type, [])
    }


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_named_metrics_exist(document, metric_names):
    named = set(re.findall(r"(?<!job:)\bvit_[a-z0-9_]+\b", document.read_text()))
    # Architectures and libraries have similar names.
    families = r"tiny|small|base|large|huge|[blh]_\d|so\d|w\d|jax|pe_|s?relpos"
    named = {name for name in named if not re.match(rf"vit_({families})", name)}

    assert named <= metric_names


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_named_settings_exist(document):
    # Variables that are not settings: VIT_SHARED of tests, VIT_API_KEY of clients, and the example
    # of docs/extensions.md.
    settings = {f"{ENV_PREFIX}{name.upper()}" for name in settings_class().model_fields} | {
        "VIT_SHARED",
        "VIT_API_KEY",
        "VIT_AUDIT_FILE",
    }

    assert set(re.findall(r"\bVIT_[A-Z0-9]\w*\b", document.read_text())) <= settings


def test_every_metric_is_documented(metric_names):
    named = set(re.findall(r"`(vit_\w+)", (REPOSITORY / "docs/metrics.md").read_text()))

    assert {_family(name) for name in metric_names if name.startswith("vit_")} == {
        _family(name) for name in named
    }


def _family(name: str) -> str:
    """Return the name of a sample without the suffix of its type."""
    return re.sub(r"_(total|bucket|sum|count)$", "", name)


def test_readme_is_a_landing_page():
    assert _words(REPOSITORY / "README.md") <= README_WORDS


def test_docs_read_in_an_hour():
    pages = [*REPOSITORY.glob("docs/*.md")]

    assert len(pages) <= 16
    assert sum(map(_words, pages)) <= DOCS_WORDS


def test_changelog_is_short():
    assert len((REPOSITORY / "CHANGELOG.md").read_text().splitlines()) <= 80


@pytest.mark.parametrize("page", DECISIONS, ids=lambda path: path.name)
def test_decision_is_one_short_page(page):
    assert _words(page) <= DECISION_WORDS


@pytest.mark.parametrize("page", DECISIONS, ids=lambda path: path.name)
def test_architecture_links_decision(page):
    assert f"(decisions/{page.name})" in (REPOSITORY / "docs/architecture.md").read_text()


def test_every_page_is_part_of_the_site():
    site = (REPOSITORY / "mkdocs.yml").read_text()
    names = [path.name for path in REPOSITORY.glob("docs/*.md")]

    assert [name for name in names if f"- {name}" not in site] == []


@pytest.mark.parametrize("document", PAGES, ids=lambda path: path.name)
def test_prose_is_wrapped(document):
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.M | re.S)
    prose = [line for line in text.splitlines() if not line.startswith(("|", "#", "!["))]

    # Code spans and links cannot be broken.
    breakable = [re.sub(r"`[^`]*`|\]\([^)]*\)", "x", line) for line in prose]
    assert [line for line in breakable if len(line) > 100] == []


def _words(page: Path) -> int:
    return len(page.read_text().split())


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_named_extras_exist(document):
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    named = ",".join(re.findall(r"(?:vitserve|'\.)\[([\w,]+)\]", document.read_text()))

    assert set(filter(None, named.split(","))) <= extras.keys()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_named_files_exist(document):
    named = set(
        re.findall(
            r"(?<![\w/.-])((?:service|model|vitserve|tests|docs|benchmarks)/[\w/.-]*\w)",
            document.read_text(),
        )
    )

    assert {name for name in named if not (REPOSITORY / name).exists()} == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_a_file(document):
    targets = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", document.read_text())

    assert [target for target in targets if not (document.parent / target).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_a_heading(document):
    links = re.findall(r"\]\((?!https?:)([^)#\s]*)#([^)\s]+)\)", document.read_text())
    pages = {name: (document.parent / name if name else document) for name, _ in links}

    assert [(name, anchor) for name, anchor in links if anchor not in _anchors(pages[name])] == []


def _anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    titles = re.findall(
        r"^#+ (.*)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), re.M
    )
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_docs_list_paths_without_key():
    section = (REPOSITORY / "docs/api.md").read_text().split("## Keys")[1].split("\n## ")[0]
    first_cells = "".join(row.split("|")[1] for row in re.findall(r"^\|.*", section, re.M))

    public = inside(app()).state.rules.public
    without_files = {path for path in public if "." not in path} | {"/openapi.json", "/metrics"}
    assert set(re.findall(r"`(/\S*)`", first_cells)) == without_files


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_compose_sends_no_signal(document):
    # https://github.com/moby/moby/issues/41302: Compose would not restart it after a crash.
    assert not re.search(r"docker[ -](?:compose )?.*kill .*(?:-s\b|--signal)", document.read_text())


def test_docs_name_index_of_cpu_torch():
    deployment = (REPOSITORY / "docs/deployment.md").read_text()
    [systemd] = re.findall(r"^## systemd\n(.*?)^## ", deployment, re.M | re.S)
    [start] = re.findall(
        r"^## Start\n(.*?)^## ", (REPOSITORY / "README.md").read_text(), re.M | re.S
    )
    [index] = re.findall(r"cpu\) index=(\S+) ;;", (REPOSITORY / "Dockerfile").read_text())

    assert f"--index-url {index} torch" in systemd
    assert f"TORCH_INDEX_URL={index}" in start
