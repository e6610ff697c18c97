"""The documents say what is there: routes, metrics, errors, commands."""

import re
import tomllib
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from gateway.admin.routes import AdminParts, build_admin
from gateway.admin.views import DecisionView
from gateway.errors import TABLE
from gateway.metrics import Metrics, Snapshot
from gateway.settings import Settings
from policies.document import read
from policies.ledger import Ledger
from workers.fleet import Fleet

PROJECT = Path(__file__).parents[2]
DOCS = {file.name: file.read_text("utf-8") for file in [PROJECT / "README.md", *PROJECT.glob("docs/*.md")]}


def test_the_admin_routes() -> None:
    nothing: Any = None
    fleet = Fleet()
    app = build_admin(AdminParts(Settings(), fleet, Ledger(), *[nothing] * 10))
    routes = {
        f"`{method.upper()} {path}`" for path, item in app.openapi()["paths"].items() for method in item
    }
    documented = set(re.findall(r"^\| (`[A-Z]+ /\S+`) \|", DOCS["admin-api.md"], re.MULTILINE))
    assert documented == routes


def test_the_metrics_and_their_labels() -> None:
    metrics = Metrics(Snapshot, serves=lambda _: True, knows_worker=lambda _: True)
    assert isinstance(metrics.registry, CollectorRegistry)
    metrics.request("a", "m", "o")
    metrics.decision("p", "a", "r", 0)
    metrics.kv_events("w", "stored")
    metrics.upstream_error("w", "reset")
    metrics.unrenderable("m", "r")
    metrics.cached_tokens("w", "m", "local", predicted=1, actual=0)
    metrics.cached_tokens("w", "m", "local", predicted=1, actual=0, excused="in_doubt")
    page = metrics.exposition()[0].decode()
    exposed = set(re.findall(r"^# TYPE (moongate_\w+) (?:counter|gauge|histogram)$", page, re.MULTILINE))
    rows = dict(re.findall(r"^\| `(moongate_\w+)` \|([^|]*)\|", DOCS["operations.md"], re.MULTILINE))
    assert set(rows) == exposed
    for name, labels in rows.items():
        listed = sorted(label for label in labels.replace(",", " ").split())
        shown = re.search(rf"^{name}\{{([^}}]*)\}}", page, re.MULTILINE)
        if shown:
            assert sorted(re.findall(r"(\w+)=", shown[1])) == listed, name


def test_the_errors() -> None:
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \| `(\w+)` \|", DOCS["operations.md"], re.MULTILINE)
    assert rows == [(str(kind.status), kind.type, kind.code) for kind in TABLE.values()]


def test_why_a_prompt_is_not_known() -> None:
    files = (file for room in ("store", "gateway") for file in PROJECT.glob(f"{room}/**/*.py"))
    source = "".join(file.read_text("utf-8") for file in files)
    codes = set(re.findall(r'(?:Unrenderable\(|unknown=)"([a-z_]+)"', source))
    table = DOCS["admin-api.md"].partition("| `unrenderable` | is |")[2].partition("`GET")[0]
    assert codes > {"invalid", "off"}
    assert codes <= set(re.findall(r"`([a-z_]+)`", table))


def test_the_decision_shown_has_what_decisions_have() -> None:
    text = DOCS["admin-api.md"].partition("```json\n")[2].partition("```")[0]
    DecisionView.model_validate_json(text)


def test_links_between_documents_lead_somewhere() -> None:
    for name, text in DOCS.items():
        base = PROJECT if name == "README.md" else PROJECT / "docs"
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
            assert (base / target).is_file(), (name, target)


def test_the_policy_document_in_the_docs_is_one() -> None:
    blocks = re.findall(r"^```toml\n(policy = .*?)^```", DOCS["policies.md"], re.MULTILINE | re.DOTALL)
    (document,) = (read(tomllib.loads(block)) for block in blocks)
    assert [rule.match.tenant for rule in document.rules] == [[], ["night"]]
