"""The chart as a package: versions, lint, and files that follow from the code."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import helm_python
import pytest
import yaml

from tests.chart.chart import CHART_FOLDER, NEWEST, OLDEST, Object, chart, objects, parsed
from tests.chart.kube_schemas import problems
from tests.effort import some
from tests.paths import ROOT


def script(name: str) -> ModuleType:
    """A file of scripts/, which is no package, as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_schema_and_page_of_values_are_current() -> None:
    values = script("chart_values")
    again = "run `python scripts/chart_values.py`"
    assert values.SCHEMA.read_text() == values.schema_text(), again
    assert values.DOCUMENT.read_text() == values.document_text(), again


def test_the_page_of_values_is_made_of_sentences() -> None:
    text = script("chart_values").document_text()
    assert re.findall(r"[^.] One of `", text) == []
    assert re.findall(r"\| (?:Its|Their|Whether there (?:is|are)) [^|]*", text) == []


def test_the_page_of_values_has_units_in_a_column() -> None:
    text = script("chart_values").document_text()
    assert "| `keepalive_s` | s |" in text
    assert "| `model.sizeGi` | `0` | GiB |" in text
    named = re.findall(r"^\| `\S+(?:_s|_ms|_bytes|_tokens|Seconds|Gi)` \|.*", text, re.MULTILINE)
    unit = re.compile(r" \| (?:s|ms|bytes|tokens|GiB) \| ")
    assert [row for row in named if not unit.search(row)] == []


def test_every_value_has_a_default_and_a_meaning() -> None:
    values = yaml.safe_load((CHART_FOLDER / "values.yaml").read_text())
    schema = json.loads((CHART_FOLDER / "values.schema.json").read_text())

    def compare(part: dict, default: object, path: str) -> None:
        assert part.get("description"), path
        if "properties" in part:
            assert isinstance(default, dict), path
            if default:
                assert set(part["properties"]) - {"global"} == set(default), path
                for name in default:
                    compare(part["properties"][name], default[name], f"{path}.{name}")

    compare(schema | {"description": "all"}, values, "")


def test_the_versions_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    metadata = chart().metadata
    assert metadata["appVersion"] == project["version"]
    assert metadata["kubeVersion"] == f">={OLDEST}-0"
    changes = (CHART_FOLDER / "CHANGELOG.md").read_text()
    assert re.findall(r"^## (\S+)$", changes, re.MULTILINE)[0] == metadata["version"]


def test_lint_finds_nothing() -> None:
    for version in (OLDEST, NEWEST):
        report = helm_python.lint(CHART_FOLDER, {}, strict=True, kube_version=f"v{version}")
        worse = [each for each in report["messages"] if each["severity"] > 1]
        assert (worse, report["errors"]) == ([], [])


def test_the_package_renders_as_the_folder_does(tmp_path: Path) -> None:
    archive = helm_python.package(CHART_FOLDER, destination=tmp_path)
    assert Path(archive).name == f"baton-{chart().version}.tgz"
    with helm_python.Chart.load(archive) as packed:
        assert packed.render({}, name="demo") == chart().render({}, name="demo")
        assert "CHANGELOG.md" in [each["name"] for each in packed.files]


def render_below(parent: Path, values: dict[str, Any], entry: dict[str, str]) -> list[Object]:
    """The objects of a chart, in the folder `parent`, that has ours as a dependency."""
    shutil.copytree(CHART_FOLDER, parent / "charts/baton")
    dependency = {"name": "baton", "version": chart().version} | entry
    metadata = {"apiVersion": "v2", "name": "parent", "version": "1.0.0"}
    metadata_file = yaml.safe_dump(metadata | {"dependencies": [dependency]})
    (parent / "Chart.yaml").write_text(metadata_file)
    with helm_python.Chart.load(parent) as loaded:
        loaded.validate_schema(values)
        return parsed(loaded.render(values, name="demo", namespace="ai"))


@pytest.mark.parametrize("enabled", [True, False])
def test_a_parent_chart_switches_it_by_a_condition(tmp_path: Path, enabled: bool) -> None:
    values = {"baton": {"enabled": enabled}, "global": {"imageRegistry": "x"}}
    found = render_below(tmp_path, values, {"condition": "baton.enabled"})
    assert bool(found) is enabled


@pytest.mark.parametrize("alias", some(["Llama", "llama_3", "70b"], 1))
def test_a_parent_chart_may_give_it_another_name(tmp_path: Path, alias: str) -> None:
    found = render_below(tmp_path, {}, {"alias": alias})
    assert [each for one in found for each in problems(one, NEWEST)] == []
    names = [each["metadata"]["name"] for each in found]
    assert [each for each in names if not re.fullmatch("demo-[a-z0-9-]+[a-z0-9]", each)] == []


def test_the_examples_of_the_page_render() -> None:
    page = (ROOT / "docs/kubernetes.md").read_text()
    examples = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert examples
    for example in examples:
        assert len(example.splitlines()) <= 11
        assert objects(yaml.safe_load(example))


def unknown_metrics(text: str) -> list[str]:
    """The metrics that a text names and docs/observability.md does not; a test keeps that table
    current."""
    table = (ROOT / "docs/observability.md").read_text()
    known = set(re.findall(r"^\| `(baton_\w+)`", table, re.MULTILINE))
    named = sorted(set(re.findall(r"\bbaton_[a-z_]*[a-z]", text)))
    return [each for each in named if re.sub(r"_(bucket|sum|count)$", "", each) not in known]


def test_metrics_of_the_page_dashboards_and_rules_exist() -> None:
    page = ROOT / "docs/kubernetes.md"
    files = [path for path in (CHART_FOLDER / "files").rglob("*") if path.is_file()]
    for path in [page, *files]:
        assert unknown_metrics(path.read_text()) == [], path.name
    assert unknown_metrics("rate(baton_router_workers_lots_total[5m])") != []
