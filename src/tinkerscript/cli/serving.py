"""`tinkerscript serve | engine`, and the hidden commands that our own processes start as children."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tinkerscript.cli.conventions import (
    DeviceOption,
    Dtype,
    DtypeOption,
    ExitWithParent,
    LogFormat,
    LogFormatOption,
    console,
    extra,
    fail,
    log_to_stderr,
    on_port,
    one_line_errors,
    run_to_exit,
)
from tinkerscript.errors import ConfigError, StoreError


def serve(
    config: Annotated[
        Path | None, typer.Argument(help="Config of a run; serves its episodes without a trainer.")
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="Folder of a run; restarts its server.")] = None,
    checkpoint: Annotated[
        str | None, typer.Option(help="Folder of a causal language model to serve.")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="0: a free port.", show_default="10086, or a free one"),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to bind, with --checkpoint.")] = "127.0.0.1",
    device: DeviceOption = "cpu",
    dtype: DtypeOption = Dtype.FLOAT32,
    exit_with_parent: ExitWithParent = False,
) -> None:
    """Serve a model, or the episodes of a run.

    A model (--checkpoint) becomes an OpenAI-compatible endpoint; CONFIG starts a run's interchange server.
    """
    with one_line_errors():
        if checkpoint is not None and (config is not None or resume is not None):
            fail("--checkpoint serves a model: give no CONFIG and no --resume with it")
        with extra("server" if checkpoint is None else "all"):
            from tinkerscript.commands.serve import serve_checkpoint, serve_run
        if checkpoint is not None:
            wanted = "auto" if port is None else port
            work = serve_checkpoint(checkpoint, host, wanted, console(), device=device, dtype=dtype.value)
            run_to_exit(work, exit_with_parent=exit_with_parent)
        run_to_exit(serve_run(config, resume, console(), on_port(port)), exit_with_parent=exit_with_parent)


def engine(
    checkpoint: Annotated[str, typer.Option(help="Folder of the model, or `tiny`.")] = "tiny",
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Serve Tinker's protocol here; 0: a free port.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to bind with --port.")] = "127.0.0.1",
    state_dir: Annotated[
        Path, typer.Option(help="With --port: folder of its sessions and checkpoints.")
    ] = Path("runs/engine"),
    name: Annotated[
        str, typer.Option(help="With --port: the model's name to clients.", show_default="its folder")
    ] = "",
    full: Annotated[
        bool, typer.Option("--full", help="With --port: runs train all weights, not LoRA adapters.")
    ] = False,
    threads: Annotated[int, typer.Option(min=1, help="With --port: torch threads.")] = 1,
    max_batch: Annotated[int, typer.Option(min=1, help="With --port: sequences decoded together.")] = 128,
    max_runs: Annotated[int, typer.Option(min=1, help="With --port: training runs in memory.")] = 8,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = Dtype.FLOAT32,
    activation_checkpointing: Annotated[
        bool,
        typer.Option("--activation-checkpointing", help="With --port: recompute activations to save memory."),
    ] = False,
    link: Annotated[str, typer.Option(help="Sample for the server with this link (its server.json).")] = "",
    link_keys: Annotated[
        Path | None, typer.Option(help="Folder of the link's keys, if it has any (its server.json).")
    ] = None,
    exit_with_parent: ExitWithParent = False,
) -> None:
    """Serve a model over Tinker's protocol.

    With --port, serve any Tinker client over HTTP; with --link, sample for an interchange server.
    """
    with one_line_errors():
        if (port is None) == (not link):
            fail("give --port to serve Tinker's protocol, or --link to sample for a server")
        with extra("all"):
            from tinkerscript.commands.serve_engine import sample_for_server, serve_tinker
        if port is None:
            work = sample_for_server(checkpoint, link, device=device, dtype=dtype.value, link_keys=link_keys)
            run_to_exit(work, exit_with_parent=exit_with_parent)
        work = serve_tinker(
            checkpoint,
            console(),
            state_dir=state_dir,
            name=name,
            host=host,
            port=port,
            full=full,
            threads=threads,
            max_batch=max_batch,
            max_runs=max_runs,
            device=device,
            dtype=dtype.value,
            activation_checkpointing=activation_checkpointing,
        )
        run_to_exit(work, exit_with_parent=exit_with_parent)


def interchange_server(
    run_dir: Annotated[Path, typer.Option(help="Folder of the run.")],
    exit_with_parent: ExitWithParent = False,
    serve_model: Annotated[
        bool, typer.Option(help="Serve the model itself: the client token is its API key.")
    ] = False,
    log_format: LogFormatOption = LogFormat.TEXT,
) -> None:
    """Run the interchange server of a run folder. `train` and `serve` start this process."""
    log_to_stderr(log_format)
    with one_line_errors(ConfigError, StoreError):
        with extra("server"):
            from tinkerscript.server.process import run_server
        run_server(run_dir, exit_with_parent=exit_with_parent, serve_model=serve_model)


def run_gateway_process(
    number: Annotated[int, typer.Option(help="Number of this gateway process.")],
    channel: Annotated[int, typer.Option(help="File descriptor of the socket to the server.")],
    listener: Annotated[int, typer.Option(help="File descriptor of the socket for model calls.")],
    exit_with_parent: ExitWithParent = True,
) -> None:
    """Answer the model calls of some claims. The interchange server starts this process."""
    del exit_with_parent  # It is always true.
    log_to_stderr()
    with one_line_errors(ConfigError):
        with extra("server"):
            from tinkerscript.server.gateway_process import run_gateway
        run_gateway(number, channel=channel, listener=listener)


def device_rank() -> None:
    """Compute for one device of an engine. The engine starts this process for each but the first."""
    with one_line_errors():
        with extra("all"):
            from tinkerscript.commands.train import follow_command
        follow_command()
