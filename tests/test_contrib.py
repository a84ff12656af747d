"""What ships for Prometheus and Grafana loads there, and names nothing that is not exported."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator

from dedupjobs import readings

CONTRIB = Path(__file__).parent.parent / "contrib"
DASHBOARD = json.loads((CONTRIB / "grafana-dashboard.json").read_text())
RULES = yaml.safe_load((CONTRIB / "prometheus-alerts.yml").read_text())

SPAN = r"^([0-9]+(ms|[smhdwy]))+$"
TEXT = {"type": "string", "minLength": 1}

# As https://prometheus.io/docs/prometheus/latest/configuration/alerting_rules/ has it.
RULES_SCHEMA = {
    "type": "object",
    "required": ["groups"],
    "additionalProperties": False,
    "properties": {
        "groups": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["name", "rules"],
                "additionalProperties": False,
                "properties": {
                    "name": TEXT,
                    "interval": {"type": "string", "pattern": SPAN},
                    "rules": {
                        "type": "array",
                        "minItems": 1,
                        "items": {
                            "type": "object",
                            "required": ["alert", "expr", "labels", "annotations"],
                            "additionalProperties": False,
                            "properties": {
                                "alert": {"type": "string", "pattern": "^[A-Za-z_][A-Za-z0-9_]*$"},
                                "expr": TEXT,
                                "for": {"type": "string", "pattern": SPAN},
                                "labels": {
                                    "type": "object",
                                    "required": ["severity"],
                                    "properties": {
                                        "severity": {"enum": ["critical", "warning", "info"]}
                                    },
                                    "additionalProperties": {"type": "string"},
                                },
                                "annotations": {
                                    "type": "object",
                                    "required": ["summary", "description"],
                                    "additionalProperties": TEXT,
                                },
                            },
                        },
                    },
                },
            },
        }
    },
}

# The parts of Grafana's dashboard model (schemaVersion 39) that an import needs.
POSITION = {
    "type": "object",
    "required": ["h", "w", "x", "y"],
    "properties": {
        "h": {"type": "integer", "minimum": 1},
        "w": {"type": "integer", "minimum": 1, "maximum": 24},
        "x": {"type": "integer", "minimum": 0, "maximum": 23},
        "y": {"type": "integer", "minimum": 0},
    },
}
SOURCE = {
    "type": "object",
    "required": ["type", "uid"],
    "properties": {"type": {"const": "prometheus"}, "uid": {"const": "${datasource}"}},
}
PANEL = {
    "type": "object",
    "required": ["id", "type", "title", "gridPos"],
    "properties": {"id": {"type": "integer"}, "title": TEXT, "gridPos": POSITION},
    "if": {"properties": {"type": {"const": "row"}}},
    "then": {"required": ["collapsed", "panels"]},
    "else": {
        "required": ["datasource", "targets", "fieldConfig", "options"],
        "properties": {
            "type": {"enum": ["timeseries", "stat"]},
            "datasource": SOURCE,
            "fieldConfig": {"type": "object", "required": ["defaults", "overrides"]},
            "targets": {
                "type": "array",
                "minItems": 1,
                "items": {
                    "type": "object",
                    "required": ["refId", "expr", "datasource"],
                    "properties": {
                        "refId": {"type": "string", "pattern": "^[A-Z]$"},
                        "expr": TEXT,
                        "legendFormat": {"type": "string"},
                        "datasource": SOURCE,
                    },
                },
            },
        },
    },
}
DASHBOARD_SCHEMA = {
    "type": "object",
    "required": ["title", "uid", "schemaVersion", "panels", "templating", "time"],
    "properties": {
        "title": TEXT,
        "uid": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,40}$"},
        "schemaVersion": {"type": "integer", "minimum": 36},
        "panels": {"type": "array", "minItems": 1, "items": PANEL},
        "time": {"type": "object", "required": ["from", "to"]},
        "templating": {
            "type": "object",
            "required": ["list"],
            "properties": {
                "list": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "required": ["name", "type", "query"],
                        "properties": {"type": {"enum": ["datasource", "query"]}},
                    },
                }
            },
        },
    },
}


def expressions() -> Iterator[str]:
    """Yield every expression of both files."""
    for group in RULES["groups"]:
        yield from (rule["expr"] for rule in group["rules"])
    for panel in DASHBOARD["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["definition"]


def exported() -> dict[str, tuple[str, ...]]:
    """Return the name of each sample with its labels."""
    found = {}
    for family in readings.empty():
        name = f"{readings.PREFIX}{family.name}"
        if family.kind == "histogram":
            found[f"{name}_bucket"] = (*family.labels, "le")
            found |= {f"{name}_{part}": family.labels for part in ("sum", "count")}
        else:
            found[name] = family.labels
    return found


def test_rules_are_what_prometheus_loads() -> None:
    Draft202012Validator(RULES_SCHEMA).validate(RULES)
    names = [rule["alert"] for group in RULES["groups"] for rule in group["rules"]]
    assert len(names) == len(set(names)) > 10
    # Prometheus' own opinion, where it is installed (Debian's package is `prometheus`).
    if promtool := shutil.which("promtool"):
        command = [promtool, "check", "rules", str(CONTRIB / "prometheus-alerts.yml")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_lock_server_that_is_away_is_told_otherwise_than_a_coordinator_or_the_queues() -> None:
    """Its loss takes the coordinator's sign of life away, and no job's message."""
    rules = {rule["alert"]: rule for group in RULES["groups"] for rule in group["rules"]}
    assert rules["DedupjobsNoCoordinator"]["expr"] == 'dedupjobs_alerts{kind="no_coordinator"} > 0'
    down = {
        name: (set(re.findall(r'server=~?"([^"]*)"', rule["expr"])), rule["labels"]["severity"])
        for name, rule in rules.items()
        if "redis_server_up" in rule["expr"]
    }
    assert down == {
        "DedupjobsRedisDown": ({"queue .*"}, "critical"),
        "DedupjobsLockServerDown": ({"locks.*"}, "warning"),
        "DedupjobsNoLocks": ({"locks.*"}, "critical"),
    }
    assert not any("redis_up" in rule["expr"] for rule in rules.values())


def test_dashboard_is_what_grafana_imports() -> None:
    Draft202012Validator(DASHBOARD_SCHEMA).validate(DASHBOARD)
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    for panel in DASHBOARD["panels"]:
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in DASHBOARD["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells)), "no two panels overlap"


@pytest.mark.parametrize("expression", sorted(set(expressions())))
def test_every_name_and_label_is_exported(expression: str) -> None:
    there = exported()
    names = set(re.findall(r"\bdedupjobs_\w+", expression))
    assert names
    assert names <= set(there)
    known = {label for name in names for label in there[name]}
    for grouped in re.findall(r"\b(?:by|on) \(([^)]*)\)", expression):
        assert {label.strip() for label in grouped.split(",")} <= known
    for name, matchers in re.findall(r"(dedupjobs_\w+)\{([^}]*)\}", expression):
        assert set(re.findall(r"(\w+)=", matchers)) <= set(there[name])


def test_legends_and_sentences_name_labels_that_are_there() -> None:
    there = exported()
    told: list[tuple[str, str]] = []
    for group in RULES["groups"]:
        for rule in group["rules"]:
            words = " ".join(rule["annotations"].values())
            told += [(rule["expr"], n) for n in re.findall(r"\$labels\.(\w+)", words)]
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            found = re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
            told += [(target["expr"], name) for name in found]
    assert len(told) > 20
    for expression, label in told:
        kept = re.findall(r"\b(?:by|on) \(([^)]*)\)", expression)
        names = re.findall(r"\bdedupjobs_\w+", expression)
        labels = {label for name in names for label in there[name]}
        if kept:
            labels &= {each.strip() for group in kept for each in group.split(",")}
        assert label in labels, (expression, label)


def test_every_metric_is_shown_or_watched() -> None:
    text = " ".join(expressions())
    missing = {
        family.name for family in readings.empty() if f"{readings.PREFIX}{family.name}" not in text
    }
    assert missing == set()


def test_what_the_page_on_metrics_lists_is_what_there_is() -> None:
    page = (CONTRIB.parent / "docs" / "observability.md").read_text()
    listed = re.findall(r"^\| `(\w+)", page, re.MULTILINE)
    assert sorted(name for name in listed if name in readings.names()) == readings.names()
