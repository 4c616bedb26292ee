"""The config models refuse what they do not know, and the docs say what they do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tinkerscript.config import dump_config, import_name, load_config, parse_config
from tinkerscript.errors import ConfigError

ROOT = Path(__file__).parents[2]
ALIAS_BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 13)
)
"""A kilobyte that stands for 9 ** 13 values."""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bar: 2", r"unknown key 'bar'; the top level knows cluster, enable_tinkerscript_mode, engine"),
        ("training: {step: 5}", r"unknown key 'training.step'; did you mean steps\?"),
        ("trainig: {}", r"unknown key 'trainig'; did you mean training\?"),
        ("learning_rate: 1", r"unknown key 'learning_rate'; did you mean training.learning_rate\?"),
        ("task: {xyz: 1}", r"unknown key 'task.xyz'; the section 'task' knows eval_args, name, sandbox_conf"),
        ("training: {steps: -1}", r"training.steps: input should be greater than or equal to 0, got -1"),
        ("engine: {threads: many}", r"engine.threads: .* valid integer.*, got 'many'"),
        ("- a list", r"must hold a mapping"),
        ("a: [", r"is not valid YAML"),
        ("[" * 5000, r"is not valid YAML: it is nested too deeply"),
        ("seed: 2020-13-45", r"is not valid YAML: month must be in 1..12"),
        ("seed: !!timestamp 'x'", r"is not valid YAML"),
        ("seed: " + "9" * 5000, r"is not valid YAML: Exceeds the limit"),
        ("seed: &a [*a]", r"is not valid YAML: an alias refers to a value that contains it"),
        (ALIAS_BOMB, r"expands to more than 100000 values"),
        ("a: !!python/object/apply:os.system ['true']", "is not valid YAML"),
    ],
)
def test_what_cannot_be_used_is_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"bad\.yaml.*{message}"):
        parse_config(text, source="bad.yaml")


def test_several_tasks_have_weights_and_names_of_their_own() -> None:
    config = parse_config("tasks: [{name: a, weight: 2}, {name: b}]", source="x")
    assert [(task.name, task.weight) for task in config.all_tasks] == [("a", 2.0), ("b", 1.0)]
    assert [task.name for task in parse_config("task: {name: a}", source="x").all_tasks] == ["a"]
    for text, message in {
        "{task: {name: a}, tasks: [{name: b}]}": "give `task` or `tasks`, not both",
        "tasks: [{name: a}, {name: a}]": "each of `tasks` needs a name of its own",
        "tasks: [{name: a, weight: 0}]": "tasks.0.weight: input should be greater than 0",
        "tasks: [{nam: a}]": "unknown key 'tasks.0.nam'; did you mean name",
    }.items():
        with pytest.raises(ConfigError, match=message):
            parse_config(text, source="x")


def test_overrides_win_and_are_checked() -> None:
    config = parse_config("training: {steps: 5}", source="x", overrides=["training.steps=7", "seed=3"])
    assert (config.training.steps, config.seed) == (7, 3)
    with pytest.raises(ConfigError, match=r"unknown key 'training\.stepz'"):
        parse_config("{}", source="x", overrides=["training.stepz=7"])
    with pytest.raises(ConfigError, match="'seed' is not of the form"):
        parse_config("{}", source="x", overrides=["seed"])


@pytest.mark.parametrize("word", ["off", "all", "every 10"])
def test_recording_is_a_bare_word_of_yaml(tmp_path: Path, word: str) -> None:
    (tmp_path / "config.yaml").write_text(f"recording: {word}\n")
    config = load_config(tmp_path / "config.yaml")
    assert config.recording == word
    (tmp_path / "dumped.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "dumped.yaml").recording == word


def test_names_of_user_code_are_imported(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("reward = 7")
    (tmp_path / "broken.py").write_text("def reward(:")
    assert import_name(f"{path}:reward", what="x") == 7
    assert import_name("tinkerscript.config:import_name", what="x") is import_name
    for text, message in {
        "reward": "metrics.extra: 'reward' is not of the form module:name or file.py:name",
        f"{path}:other": "metrics.extra: cannot import .*mine.py:other.*attribute 'other'.*check the path",
        f"{tmp_path}/broken.py:x": "cannot import .*broken.py:x.*importing it raised SyntaxError",
        f"{tmp_path}/no.py:x": "cannot import .*No such file.*check the path",
        "no_such_module:x": "cannot import 'no_such_module:x': No module named 'no_such_module'; is no_such_",
    }.items():
        with pytest.raises(ConfigError, match=message):
            import_name(text, what="metrics.extra")


def test_what_a_config_reads_is_seen_from_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configs, shell = tmp_path / "configs", tmp_path / "shell"
    for folder in (configs / "model", shell / "other", shell / "tiny"):
        folder.mkdir(parents=True)
    (configs / "run.yaml").write_text(
        "tasks:\n"
        "  - {name: tasks/a.py@words, sandbox_type: docker, sandbox_config: compose.yaml}\n"
        "  - {name: inspect_evals/gsm8k, sandbox_type: k8s, sandbox_config: of-the-provider}\n"
        "training: {judge: {function: judging.py:judge}}\n"
        "engine: {model: model, checkpoint: tinker://x}\n"
        "sft: {data: chats.jsonl}\n"
        "metrics: {extra: [mine.py:best, package.module:worst]}\n"
    )
    (configs / "compose.yaml").touch()
    monkeypatch.chdir(shell)
    config = load_config(configs / "run.yaml")
    sandboxes = [task.sandbox for task in config.tasks]
    assert sandboxes == [f"docker:{configs}/compose.yaml", "k8s:of-the-provider"]
    assert config.training.judge.function == f"{configs}/judging.py:judge"
    assert [task.name for task in config.tasks] == [f"{configs}/tasks/a.py@words", "inspect_evals/gsm8k"]
    assert (config.engine.model, config.engine.checkpoint) == (f"{configs}/model", "tinker://x")
    assert config.sft.data == f"{configs}/chats.jsonl"
    assert config.metrics.extra == [f"{configs}/mine.py:best", "package.module:worst"]
    assert config.experiment_dir == "auto"
    (shell / "runs" / "first" / "final").mkdir(parents=True)
    (shell / "runs" / "latest").symlink_to("first")
    latest = ["sft.data=runs/latest", "engine.checkpoint=runs/latest/final"]
    (shell / "chats.jsonl").symlink_to(shell / "runs")
    config = load_config(configs / "run.yaml", latest)
    first = f"{shell}/runs/first"
    assert (config.sft.data, config.engine.checkpoint) == (first, f"{first}/final"), "soon it is another"
    assert load_config(configs / "run.yaml", ["sft.data=chats.jsonl"]).sft.data == f"{shell}/chats.jsonl"
    overrides = ["engine.model=other", "workers.script=agent.py", "engine.checkpoint=tiny"]
    config = load_config(configs / "run.yaml", overrides)
    assert config.engine.model == f"{shell}/other"
    assert config.workers.script == f"{shell}/agent.py"
    assert config.engine.checkpoint == "tiny", "the model of that name, not the folder"
    assert parse_config(dump_config(config), source="again") == config


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["engine.lora.rank=0", "inference.on_publish=finish"], "finish needs several versions on a replica"),
        (["engine.backend=tinker", "engine.lora.rank=0"], "get the weights that engine.backend: embedded"),
        (["engine.backend=tinker", "inference.on_publish=continue"], "continue needs engine.backend: embed"),
        (["inference.backend=trainer"], "launch and replicas need backend: vllm"),
        (["inference.base_url=http://x"], "give base_url for `tinkerscript serve`, or launch"),
        (["inference.launch={replicas: 2, gpus: [0]}"], "tensor_parallel: 1 need 2"),
        (["inference.on_publish=finish", "inference.max_loras=2"], "max_loras: 2 is too few"),
        (["inference.replicas=['gpu1:8000']"], "inference.replicas"),
        # Only the first device would be emptied before they wake.
        (["inference.sleep=true", "engine.devices=2"], "inference.sleep: with engine.devices: 2"),
        (["engine.quantization=int8"], "vllm would sample with the base in full precision"),
        (["engine.routing_replay=true", "inference.on_publish=move"], "vllm does not report the experts"),
    ],
)
def test_replicas_that_cannot_sample_are_refused(settings: list[str], message: str) -> None:
    text = "{engine: {lora: {rank: 8}}, inference: {backend: vllm, launch: {replicas: 1}}}"
    assert parse_config(text, source="config").inference.launch
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_config(text, source="config", overrides=settings)


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ("quantization: int8", "quantization: int8 with lora.rank: 0: a quantized base is frozen"),
        ("quantization: int8, backend: tinker, lora: {rank: 8}", "quantization: int8 with backend: tinker"),
        ("quantization: int8, sharding: shard, lora: {rank: 8}", "quantization: int8 with sharding: shard"),
        ("routing_replay: true, backend: tinker", "routing_replay: only the embedded engine replays"),
    ],
)
def test_what_an_engine_cannot_train_is_refused(engine: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_config(f"engine: {{{engine}}}", source="config")
    allowed = parse_config("engine: {lora: {rank: 8}, quantization: int8}", source="config")
    assert allowed.engine.quantization == "int8"


TEACHER = "{roles: {t: {kind: frozen, base_url: 'http://x'}}, training: {distillation: {teacher: t}}}"


@pytest.mark.parametrize(
    ("settings", "temperature", "message"),
    [
        ("seed: 1", 0, "sampling.temperature: 0 takes the most probable token"),
        ("engine: {backend: tinker}", 0.7, "0.7: a Tinker service trains only at temperature 1"),
        (TEACHER, 1.3, "1.3: the server of the teacher 't' scores only at temperature 1; set it to 1"),
    ],
)
def test_a_temperature_that_cannot_train_is_refused(settings: str, temperature: float, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_config(settings, source="config", overrides=[f"sampling.temperature={temperature}"])


@pytest.mark.parametrize("settings", ["training: {steps: 0}", "{method: sft, sft: {data: x}}"])
def test_any_temperature_will_do_where_no_sample_trains(settings: str) -> None:
    config = parse_config(settings, source="config", overrides=["sampling.temperature=0"])
    assert config.sampling.temperature == 0
