"""One scrape of a run's server has every metric of `examples/monitoring/grafana.json`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import yaml
from prometheus_client.parser import text_string_to_metric_families

from command_line import ROOT, start_training
from plain_sums import SUMS

FOLDER = ROOT / "examples" / "monitoring"
NAME = re.compile(r"\btinkerscript_\w+")
METRIC = re.compile(r'metric=~?"([^"]+)"')


def expressions() -> list[str]:
    board = json.loads((FOLDER / "grafana.json").read_text())
    return [target["expr"] for panel in board["panels"] for target in panel["targets"]]


def test_one_scrape_has_what_the_dashboard_shows(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"task.name": SUMS["name"], "task.train_args": {}, "task.eval_args": {}}
    settings |= {"evaluation.episodes": 0, "log_format": "json"}
    settings |= {"training.steps": 200, "training.groups_per_step": 2, "training.group_size": 2}
    command = start_training(tmp_path, **settings)
    page = tmp_path / "run" / "server.json"
    command.until(page.exists)
    url = json.loads(page.read_text())["url"]
    text = ""

    def has_all() -> bool:
        nonlocal text
        text = httpx.get(f"{url}/metrics", timeout=30).text
        return 'metric="reward/mean"' in text and "tinkerscript_active_clients 1.0" in text

    command.until(has_all)
    command.process.terminate()
    assert command.wait() == 130
    check_logs(tmp_path / "run" / "logs")
    families = list(text_string_to_metric_families(text))
    samples = [sample for family in families for sample in family.samples]
    declared = {
        name for each in families for name in (each.name, f"{each.name}_total", f"{each.name}_bucket")
    }
    used = {name for expression in expressions() for name in NAME.findall(expression)}
    assert len(used) > 20
    assert used <= declared
    # A run without replicas has none of theirs; tests/cluster has a run with some.
    there = {sample.name for sample in samples}
    assert {name for name in used - there if "_replica_" not in name} <= {"tinkerscript_link_drops_total"}
    shown = {each for text in expressions() for found in METRIC.findall(text) for each in found.split("|")}
    assert shown <= {sample.labels.get("metric") for sample in samples}
    assert len(samples) < 250
    assert not [each for each in samples if each.labels.get("metric", "").startswith("episode/")]


def check_logs(folder: Path) -> None:
    """The processes log JSON alone, and name the run as soon as they know it."""
    for name in ("server.log", "trainer.log"):
        records = [json.loads(line) for line in (folder / name).read_text().splitlines()]
        assert records, name
        assert all({"time", "level", "logger", "message", "pid"} <= record.keys() for record in records)
        assert {record.get("run") for record in records} == {"run"}


def test_the_scrape_config_names_the_server_alone() -> None:
    config = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())
    (job,) = config["scrape_configs"]
    assert job.get("metrics_path", "/metrics") == "/metrics"
    assert job["authorization"].keys() == {"credentials_file"}, "no token in a file that is shared"
