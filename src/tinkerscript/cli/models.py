"""`tinkerscript init | config | train | eval | lr-find | merge`: from an example to a trained model."""

from __future__ import annotations

import shutil
from pathlib import Path
from textwrap import indent
from typing import Annotated

import typer

from tinkerscript.cli.conventions import (
    DeviceOption,
    Dtype,
    DtypeOption,
    console,
    extra,
    fail,
    json_object,
    on_port,
    one_line_errors,
    run_to_exit,
)
from tinkerscript.errors import ConfigError

STARTER = Path(__file__).parents[1] / "starter"
STARTER_FILES = ("task.py", "train.yaml", "agent.py")


def init(
    folder: Annotated[Path, typer.Argument(help="Where to write; made if it does not exist.")] = Path(),
) -> None:
    """Write an example to start from: a task, a config, and an agent."""
    with one_line_errors():
        typer.echo(_write_example(folder))


def _write_example(folder: Path) -> str:
    if existing := [name for name in STARTER_FILES if (folder / name).exists()]:
        raise ConfigError(f"{folder} already has {', '.join(existing)}; name another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in STARTER_FILES:
            shutil.copyfile(STARTER / name, folder / name)
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror or error}") from error
    config, agent = folder / "train.yaml", folder / "agent.py"
    return (
        f"wrote {', '.join(STARTER_FILES)} to {folder.resolve()}\n\n"
        f"train on the task         tinkerscript train {config}\n"
        f"look at what happened     tinkerscript show runs/latest\n"
        f"let the agent solve it    tinkerscript train {config} --set workers.script={agent}"
    )


def config(
    key: Annotated[str, typer.Argument(help="Only keys with this beginning, such as training.kl.")] = "",
) -> None:
    """List the keys of a config, each with its default and its meaning."""
    with one_line_errors():
        with extra("server"):
            from tinkerscript.commands.key_texts import key_texts
        found = list(key_texts(key))
        if not found:
            fail(f"no key begins with {key!r}; `tinkerscript config` lists all")
    for title, meaning in found:
        typer.secho(title, bold=True)
        typer.echo(indent(meaning, "    "))


def train(
    config: Annotated[
        Path | None, typer.Argument(help="YAML file; `tinkerscript config` lists every key.")
    ] = None,
    override: Annotated[
        list[str] | None, typer.Option("--set", help="key.sub=value, overrides the file. Repeatable.")
    ] = None,
    resume: Annotated[
        str | None, typer.Option(help="Folder or URL of a run to resume from its newest checkpoint.")
    ] = None,
    join: Annotated[
        Path | None, typer.Option(help="Folder of a running server (`tinkerscript serve`).")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help="Port of the server and the page. 0: a free one.",
            show_default="10086, or a free one",
        ),
    ] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Print what would run where, without starting it.")
    ] = False,
    open_: Annotated[bool, typer.Option("--open", help="Open the run's page in a browser.")] = False,
) -> None:
    """Train a model with CONFIG.

    Starts the server, the workers and the trainer on this machine, or all in one process.
    """
    overrides = [*(override or []), *on_port(port)]
    with one_line_errors():
        if plan:
            with extra("server"):
                from tinkerscript.commands.plan import print_plan
            print_plan(config, overrides, console())
            return
        with extra("all"):
            from tinkerscript.commands.train import follow_command, is_follower, resumed, train_command
        folder = resumed(resume, console())
        if is_follower(config, overrides, resume=folder, join=join):
            follow_command()
            return
        run_to_exit(train_command(config, overrides, console(), resume=folder, join=join, opens=open_))


def evaluate(
    task: Annotated[str, typer.Argument(help="A task, such as file.py@name or verifiers:ENV.")],
    checkpoint: Annotated[
        str | None, typer.Option(help="Folder of a trained model, served while the eval runs.")
    ] = None,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = Dtype.FLOAT32,
    server: Annotated[str, typer.Option(help="URL of a server for the model, instead.")] = "",
    task_args: Annotated[str, typer.Option(help="Arguments of the task, as a JSON object.")] = "{}",
    model_roles: Annotated[str, typer.Option(help="Models of other roles, as a JSON object.")] = "{}",
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum number of samples.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Attempts per sample.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="Sampling temperature.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Limit per model call.")] = None,
    max_connections: Annotated[int, typer.Option(min=1, help="Concurrent model calls.")] = 32,
    sandbox: Annotated[str | None, typer.Option(help="Replaces the task's own: TYPE or TYPE:FILE.")] = None,
    log_dir: Annotated[
        Path, typer.Option(help="Folder of the log; `inspect view` shows logs of Inspect tasks.")
    ] = Path("logs"),
) -> None:
    """Evaluate a model on a task.

    On an Inspect task it works like `inspect eval`, and writes its log.
    """
    with one_line_errors():
        from tinkerscript.client.settings import client_token

        with extra("all"):
            from tinkerscript.commands.evaluate import EvalOptions, evaluate_command
        options = EvalOptions(
            task=task,
            checkpoint=checkpoint,
            device=device,
            dtype=dtype.value,
            server=server,
            api_key=client_token() or "none",
            task_args=json_object("--task-args", task_args),
            model_roles=json_object("--model-roles", model_roles),
            limit=limit,
            epochs=epochs,
            temperature=temperature,
            max_tokens=max_tokens,
            max_connections=max_connections,
            sandbox=sandbox,
            log_dir=log_dir,
        )
        run_to_exit(evaluate_command(options, console()))


def lr_find(
    run: Annotated[Path, typer.Argument(help="Folder of a run that has recorded a step or more.")],
    override: Annotated[
        list[str] | None, typer.Option("--set", help="key.sub=value, overrides the run's config. Repeatable.")
    ] = None,
) -> None:
    """Measure how far a step moves the policy at each learning rate, on the first groups of a run."""
    with one_line_errors():
        with extra("all"):
            from tinkerscript.commands.lr_find import lr_find_command
        run_to_exit(lr_find_command(run, override or [], console()))


def merge(
    checkpoint: Annotated[Path, typer.Argument(help="Folder of a LoRA checkpoint.")],
    target: Annotated[Path, typer.Argument(help="Folder to write; it must not exist.")],
) -> None:
    """Merge a LoRA checkpoint into its base model: a plain Hugging Face folder."""
    with one_line_errors():
        with extra("engine"):
            from tinkerscript.engine.lora import merged
            from tinkerscript.model_folder import copy_tokenizer
        if target.exists():
            raise ConfigError(f"{target} already exists; name a new folder")
        merged(checkpoint).save_pretrained(target)
        copy_tokenizer(checkpoint, target)
    typer.echo(f"{target} is a complete model")
