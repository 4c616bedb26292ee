"""`run_training`: one run from a config, in several processes or in one.

However it ends, everything that it opened is closed, child processes included.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import msgspec

from tinkerscript.addresses import ServerInfo, moved_to, read_server_info
from tinkerscript.config import EvaluationConfig, RunConfig
from tinkerscript.dashboard.progress import ProgressReporter
from tinkerscript.errors import AlignmentError, ConfigError, EngineError, GatewayError, LinkError
from tinkerscript.gateway.outside_server import outside_servers
from tinkerscript.ledger.history import History, Tally
from tinkerscript.model_folder import model_folder, reads_images
from tinkerscript.processes.children import (
    ServerAddress,
    former_server_gone,
    launched_ranks,
    release_former_workers,
    server_address,
    start_workers,
    worker_command,
)
from tinkerscript.processes.in_process import ServerHere
from tinkerscript.processes.launcher import MAX_RESTARTS, Launcher
from tinkerscript.processes.planned import SERVER_PROCESS, PlannedProcess, plan_of
from tinkerscript.processes.ray_launcher import open_launcher
from tinkerscript.processes.supervisor import Supervisor, run_beside
from tinkerscript.rollouts.alignment import AlignmentReport
from tinkerscript.rollouts.alignment.diagnosis import Finding
from tinkerscript.rollouts.alignment.report import explain
from tinkerscript.sampler import ProgressCallback, SampleFunction, SampleRequest, SampleResult
from tinkerscript.train.alignment_check import TrainedModel
from tinkerscript.train.backends import backend_named
from tinkerscript.train.backends.backend import FrozenModel, Publisher, TrainerBackend
from tinkerscript.train.curriculum import Curriculum
from tinkerscript.train.defaults import resolved
from tinkerscript.train.episode_source import EpisodeSource
from tinkerscript.train.frozen_model import open_frozen_role
from tinkerscript.train.group_judge import GroupJudge, RoleAsker, open_judge
from tinkerscript.train.learner import Learner, LearnerState
from tinkerscript.train.loop import TrainingLoop
from tinkerscript.train.open_run import OpenRun, begin_run, logged, open_page
from tinkerscript.train.policy import Policy
from tinkerscript.train.policy_loss import check_images, check_loss, wide_clip
from tinkerscript.train.run_folder import ALIGNMENT_FILE, FINAL_CHECKPOINT, RunFolder
from tinkerscript.train.run_status import RunStatus
from tinkerscript.train.samples import TaskSamples
from tinkerscript.train.step_metrics import extra_metrics
from tinkerscript.train.step_rows import finding_row
from tinkerscript.train.token_advantages import Distillation, open_distillation
from tinkerscript.trainer_link.messages import EpisodeAccepted
from tinkerscript.trainer_link.trainer_end import TrainerLink

if TYPE_CHECKING:
    from tinkerscript.train.replicas.publisher import ReplicaPublisher

GOODBYE_S = 2.0

logger = logging.getLogger(__name__)


async def run_training(
    config: RunConfig,
    progress: ProgressReporter,
    *,
    path: Path | None = None,
    join: bool = False,
    on_page: Callable[[str], object] | None = None,
) -> RunFolder:
    """Returns the run's folder, with results in summary.json.

    `path`: folder of a run to resume. `join`: use the server that already serves it. Without `on_page` there
    is no page.
    """
    model = model_folder(config.engine.model)
    backend_named(config.engine.backend).check(config.engine, model, progress.note)
    check_loss(config)
    check_images(config, model)
    extra = extra_metrics(config)
    judging = open_judge(config)
    samples = _samples(config)
    config, about_rates = resolved(config, model)
    folder = RunFolder(config, model, now=datetime.now(), path=path)
    async with AsyncExitStack() as stack:
        stack.callback(folder.close)
        stack.enter_context(logged(config, folder))
        progress = await stack.enter_async_context(open_page(config, folder, progress, on_page, join=join))
        opening = _children(config, folder.path, progress, join=join)
        children = await stack.enter_async_context(opening)
        sampling = _LateSampling()
        link = await stack.enter_async_context(_link(config, children, sampling.sample, progress.note))
        lag = config.replay_lag if config.training.replay_uses > 1 else 0
        plan_lag = config.max_policy_lag if config.training.on_stale == "wait" else config.training.steps
        with progress.waiting("the server to say where the run continues"):
            past = _past(link, folder, replay_lag=lag, plan_lag=plan_lag)
            asking = asyncio.create_task(past, name="ask for the past")
            history, replayed = await run_beside(children.supervisor, asking)
        run = begin_run(config, folder, progress, ledger=link, history=history, replayed=replayed)
        stack.push_async_exit(progress.exited)
        progress.begin(config.training.steps, done=history.step)
        for line in (*about_rates, *_advice(config, samples, model)):
            progress.note(line)
        if samples:
            samples.next_position, samples.again = history.next_position, list(history.again)
            if config.training.curriculum.by != "none":
                samples.curriculum = Curriculum(config.training.curriculum, config.seed)
                if history.checkpoint:
                    samples.curriculum.restore(history.checkpoint.curriculum)
                extra = [*extra, samples.curriculum.metrics]
        await stack.enter_async_context(
            launched_ranks(children.plan, children.launcher, folder.path, progress.note)
        )
        backend = await stack.enter_async_context(run.backend(model))
        if config.sampling.max_tokens >= backend.max_context:
            progress.note(
                f"sampling.max_tokens: {config.sampling.max_tokens} leaves no room for a prompt in the "
                f"model's context of {backend.max_context} tokens: a reply that does not stop fills it"
            )
        policy = Policy(
            backend,
            link,
            seed=config.seed,
            version=history.newest_version,
            in_flight=config.inference.on_publish == "continue",
        )
        learners, trained = await _learners(run, backend, policy, model, stack)
        sampling.policy = policy
        judge = None
        if judging is not None:
            servers = await stack.enter_async_context(outside_servers(config, os.environ))
            judge = GroupJudge(judging, RoleAsker(servers, policy, model), known=history.verdicts)
        async with _opened(run, progress, backend, policy, children, link) as opened:
            if config.inference.has_replicas:
                # They may download adapters from the server.
                with progress.waiting(f"the replicas (logs: {folder.path / 'logs'})"):
                    replicas = await stack.enter_async_context(_replicas(run, backend, children))
                policy.publish_to(replicas)
                folder.exported.watch(replicas.pool.replicas)
                opened, extra = replace(opened, publisher=replicas), [*extra, replicas.metrics]
            if samples and config.evaluation.every_steps and not policy.holds:
                progress.note(
                    "training waits for each evaluation: the sampler has no room for older weights besides "
                    "the newest (docs/training.md#evaluation)"
                )

            async def restore(step: int) -> None:
                for each in trained:
                    await each.restore(folder.checkpoint_name(step))

            async def renew(step: int) -> None:
                name = folder.checkpoint_name(step)
                if step not in folder.whole_checkpoints():
                    raise ConfigError(
                        f"training.kl_reference_every: the reference is the checkpoint of step {step}, which "
                        f"is not in {folder.checkpoints}: put it back, or resume without the key"
                    )
                for role, each in zip(["", *config.trained_roles], trained, strict=True):
                    where = folder.checkpoints_of(role) if role else folder.checkpoints
                    await each.renew_start(where / name)

            folder.keep_config()
            loop = TrainingLoop(
                run, samples, opened.source, policy, learners, extra, judge, restore=restore, renew=renew
            )
            with _report_written(loop, learners):
                await run_beside(opened, asyncio.create_task(loop.run(), name="training loop"))
            with progress.waiting("the final checkpoint"):
                await loop.checkpoints.write(FINAL_CHECKPOINT)
            tally = await link.tally()
        restarts = opened.supervisor.restarts
        folder.write_json("summary.json", summarize(loop, learners, tally, restarts=restarts))
        folder.draw_curve(at_once=True)
        await folder.finish_copies(progress)
    return folder


async def _past(
    link: TrainerLink, folder: RunFolder, *, replay_lag: int, plan_lag: int
) -> tuple[History, list[EpisodeAccepted]]:
    whole = folder.whole_checkpoints()
    history = await link.resume(whole, replay_lag=replay_lag, plan_lag=plan_lag)
    fetched = await link.fetch(sorted({each.episode for each in history.replayed}))
    said = history.verdicts
    return history, [each.judged(said[each.sequence]) if each.sequence in said else each for each in fetched]


class _LateSampling:
    """The server says where the run continues before there is a policy."""

    policy: Policy | None = None

    async def sample(self, request: SampleRequest, progress: ProgressCallback | None = None) -> SampleResult:
        if self.policy is None:
            raise GatewayError(503, "engine_unavailable", "the trainer is starting; retry")
        return await self.policy.sample(request, progress)


def _samples(config: RunConfig) -> TaskSamples | None:
    """Return None if clients register samples."""
    if config.all_tasks:
        return TaskSamples(config.all_tasks, seed=config.seed)
    if config.evaluation.episodes or config.workers.count:
        raise ConfigError(
            "without task.name, clients have to register the samples: set evaluation.episodes and "
            "workers.count to 0, or name a task"
        )
    return None


def _advice(config: RunConfig, samples: TaskSamples | None, model: Path) -> Iterator[str]:
    if reads_images(model) and (reason := config.no_images.get("")):
        yield f"model calls with images are refused: {reason}"
    if samples and (warning := not_held_out(samples, config.evaluation)):
        yield warning
    if samples and samples.greedy and config.sampling.precedence == "program":
        yield (
            f"the task {', '.join(samples.greedy)} asks for temperature 0, which leaves nothing to train on: "
            "change its config, or let the run decide with sampling.precedence: run"
        )
    if warning := wide_clip(config.training):
        yield warning


def not_held_out(samples: TaskSamples, evaluation: EvaluationConfig) -> str:
    interim = evaluation.interim_episodes if evaluation.every_steps else 0
    shared, number = samples.trained_too(max(evaluation.episodes, interim))
    if not shared:
        return ""
    return (
        f"{shared} of {number} evaluation samples are trained on too: the score is not held out; "
        "select another split with task.eval_args"
    )


async def _learners(
    run: OpenRun, backend: TrainerBackend, policy: Policy, model: Path, stack: AsyncExitStack
) -> tuple[list[Learner], list[TrainerBackend]]:
    """Return the run's own policy first. Also opens frozen roles and the teacher."""
    config, progress, done = run.config, run.progress, run.history.checkpoint
    frozen = dict[str, FrozenModel]()
    for name, role in config.episode_roles.items():
        if role.kind == "frozen":
            opening = open_frozen_role(
                name,
                role,
                backend,
                folder=model,
                note=progress.note,
                timeout_s=config.interchange_server.call_timeout_s,
            )
            frozen[name] = await stack.enter_async_context(opening)
            policy.add_frozen(name, frozen[name])
    distillation = await stack.enter_async_context(
        open_distillation(config, backend, folder=model, progress=progress, opened=frozen)
    )
    reports, states = dict[str, dict[str, object]](), dict[str, LearnerState]()
    if done:
        states = msgspec.json.decode(done.learners, type=dict[str, LearnerState])
        reports = {"": msgspec.json.decode(done.report), **msgspec.json.decode(done.role_reports)}

    def learner(backend: TrainerBackend, role: str, teacher: Distillation | None) -> Learner:
        return Learner(
            backend.client,
            config.training_of(role),
            model=TrainedModel.of(model, backend, scales_logits=teacher is None or teacher.scales_logits),
            report=AlignmentReport.from_json(reports.get(role, {})),
            seed=config.seed,
            role=role,
            start_logprobs=backend.start_logprobs,
            distillation=teacher,
            reply_tokens=config.sampling.reply_tokens,
            state=states.get(role, LearnerState()),
        )

    learners, backends = [learner(backend, "", distillation)], [backend]
    with progress.waiting("the engine to try the loss"):
        await learners[0].check_loss(backend)
    for name in config.trained_roles:
        with progress.waiting(f"the policy of role {name}"):
            beside = await _policy_of_role(run, name, backend)
        policy.add_trained(name, beside)
        learners.append(learner(beside, name, None))
        backends.append(beside)
    return learners, backends


async def _policy_of_role(run: OpenRun, name: str, backend: TrainerBackend) -> TrainerBackend:
    checkpoint, step = run.config.trained_roles[name].model, run.history.step
    restore = run.folder.checkpoint_name(step) if run.history.checkpoint else None
    target = run.folder.checkpoints_of(name)
    if restore and not (target / restore).is_dir():
        raise ConfigError(
            f"roles.{name}: the run's checkpoint of step {step} has no weights of this role "
            f"({target / restore}); a run keeps its trained roles when it is resumed"
        )
    try:
        return await backend.open_policy(name, checkpoint, checkpoint_dir=target, restore=restore)
    except (ConfigError, EngineError) as error:
        raise ConfigError(f"roles.{name}.model: {checkpoint or restore!r}: {error}") from error


def _replicas(
    run: OpenRun, backend: TrainerBackend, children: Children
) -> AbstractAsyncContextManager[ReplicaPublisher]:
    from tinkerscript.train.replicas.publisher import open_replicas

    launcher, config = children.launcher, run.config
    server_url = "" if launcher.shares_files else children.url_of_server(config)
    return open_replicas(
        config, run.folder.path, backend, run.progress.note, launcher=launcher, server_url=server_url
    )


@contextmanager
def _report_written(loop: TrainingLoop, learners: Sequence[Learner]) -> Generator[None]:
    try:
        yield
    except AlignmentError as error:
        last = [each.report.findings[-1]["name"] for each in learners if each.report.findings]
        if error.name not in last:
            learners[0].report.add_finding(Finding(error.name, str(error)), step=loop.step + 1)
            loop.parts.ledger.note([finding_row(loop.step + 1, error.name, str(error))])
        raise
    finally:
        loop.parts.folder.write_json(ALIGNMENT_FILE, loop.log.alignment())


@dataclass(frozen=True, slots=True)
class Opened:
    source: EpisodeSource
    supervisor: Supervisor
    backend: TrainerBackend
    policy: Policy
    link: TrainerLink
    publisher: Publisher | None = None

    async def failed(self) -> None:
        reasons = [
            *(self.supervisor.failed(), self.backend.failed(), self.policy.failed()),
            self._stop_requested(),
        ]
        if self.publisher is not None and self.publisher is not self.backend:
            reasons.append(self.publisher.failed())
        tasks = [asyncio.ensure_future(reason) for reason in reasons]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _stop_requested(self) -> None:
        await self.link.stop_requested.wait()
        raise asyncio.CancelledError("the engine was asked to stop")


@dataclass(frozen=True, slots=True)
class Children:
    supervisor: Supervisor
    address: ServerAddress
    plan: list[PlannedProcess]
    launcher: Launcher
    server_stays: bool
    here: ServerHere | None = None

    def url_of_server(self, config: RunConfig) -> str:
        return self.address.seen_from(self.launcher.address, config.interchange_server)


@asynccontextmanager
async def _children(
    config: RunConfig,
    path: Path,
    progress: ProgressReporter,
    *,
    join: bool,
) -> AsyncGenerator[Children]:
    plan = plan_of(config, path)
    async with AsyncExitStack() as stack:
        supervisor = Supervisor(max_restarts=MAX_RESTARTS, note=progress.note)
        await stack.enter_async_context(supervisor)
        log = f" (log: {path / 'logs' / 'server.log'})" if config.enable_tinkerscript_mode else ""
        with progress.waiting(f"the interchange server{log}"):
            here = None
            if not (config.enable_tinkerscript_mode or join):
                here = ServerHere(config, path, supervisor.fail)
            address = await _server(path, plan, supervisor, here and here.serving(), stack, join=join)
        moved = "" if join else moved_to(config.interchange_server, address.url)
        progress.note(f"interchange server at {address.url}, run folder {path}{moved}")
        in_ray = f"room in the Ray cluster (log: {path / 'logs' / 'ray.log'})"
        with nullcontext() if config.cluster.launcher == "local" else progress.waiting(in_ray):
            opening = open_launcher(config, plan, path, progress.note)
            launcher = await stack.enter_async_context(opening)
        supervisor.launcher = launcher
        try:
            yield Children(supervisor, address, plan, launcher, join, here)
        finally:
            await supervisor.stop()


def _link(
    config: RunConfig, children: Children, sampler: SampleFunction, note: Callable[[str], None]
) -> TrainerLink:
    address = children.address
    return TrainerLink(
        address.link_address,
        trainer_id=uuid4().hex,
        model=config.engine.model,
        sampler=sampler,
        engine_status="ENGINE.BOOTING",
        keys=address.trainer_keys(),
        note=note,
    )


@asynccontextmanager
async def _opened(
    run: OpenRun,
    status: RunStatus,
    backend: TrainerBackend,
    policy: Policy,
    children: Children,
    link: TrainerLink,
) -> AsyncGenerator[Opened]:
    config, folder, note, address = run.config, run.folder, run.progress.note, children.address
    supervisor, planned = children.supervisor, [p for p in children.plan if p.name.startswith("worker ")]
    works_here = children.here is not None and config.workers.count > 0
    if not (planned or works_here):
        note(
            f"no workers on this machine (workers.count: 0); start some where their files are, with\n  "
            f"{worker_command(config, address.url)}"
        )
    try:
        async with AsyncExitStack() as stack:
            release_former_workers(folder.path, link)
            url = children.url_of_server(config)
            await start_workers(planned, folder.path, link=link, server_url=url, supervisor=supervisor)
            if works_here and children.here is not None:
                await stack.enter_async_context(children.here.working(link, url))
            source = EpisodeSource(
                link,
                group_size=config.training.group_size,
                client_samples=not config.all_tasks,
                has_workers=bool(planned) or works_here,
            )
            pushing = asyncio.create_task(folder.exported.push(link.send_metrics), name="push metrics")
            ended_by: BaseException | None = None
            try:
                yield Opened(source, supervisor, backend, policy, link)
            except BaseException as error:
                ended_by = error
                raise
            finally:
                pushing.cancel()
                await asyncio.gather(pushing, return_exceptions=True)
                failure = f"{type(ended_by).__name__}: {ended_by}" if isinstance(ended_by, Exception) else ""
                await status.end(ended_by)
                # A failed run that ends its server has no restart to wait for.
                over = ended_by is None or (bool(failure) and not children.server_stays)
                await _say_goodbye(link, over=over, failure=failure)
    finally:
        await supervisor.stop()  # Workers may still sample, so the backend closes later.


async def _say_goodbye(link: TrainerLink, *, over: bool, failure: str) -> None:
    """Say why the trainer leaves, so that nothing waits for a timeout."""
    link.set_status(engine_status="ENGINE.OFFLINE", run_finished=over, failure=failure)
    try:
        async with asyncio.timeout(GOODBYE_S):
            await link.flush()
    except (LinkError, TimeoutError) as error:
        logger.info("link.no_goodbye error=%s", error)


async def _server(
    path: Path,
    plan: Sequence[PlannedProcess],
    supervisor: Supervisor,
    here: AbstractAsyncContextManager[ServerInfo] | None,
    stack: AsyncExitStack,
    *,
    join: bool,
) -> ServerAddress:
    if join:
        info = read_server_info(path)
        if info is None:
            raise LinkError(f"no server serves {path}: start one with `tinkerscript serve --resume {path}`")
        return _address(info)
    await former_server_gone(path)
    if here is not None:
        return _address(await stack.enter_async_context(here))
    server = next(process for process in plan if process.name == SERVER_PROCESS).child(path)
    await supervisor.start(server)
    return await server_address(path, server, supervisor)


def _address(info: ServerInfo) -> ServerAddress:
    return ServerAddress(info.url, info.link_address, Path(info.link_keys) if info.link_keys else None)


def summarize(
    loop: TrainingLoop, learners: Sequence[Learner], tally: Tally, *, restarts: int
) -> dict[str, Any]:
    config, seconds = loop.parts.config, loop.train_seconds
    evaluations = loop.evaluator.finished
    before, after = evaluations.get("before"), evaluations.get("after")
    report = learners[0].report
    train_episodes = tally.planned_accepted if config.all_tasks else tally.train_accepted
    scores = {label: msgspec.json.decode(row.role_scores) for label, row in evaluations.items()}
    roles = {
        each.role: {
            "eval_before": scores.get("before", {}).get(each.role),
            "eval_after": scores.get("after", {}).get(each.role),
            **each.summary(),
        }
        for each in learners[1:]
    }
    return {
        "eval_before": before.score if before else None,
        "eval_before_margin": before.margin if before else None,
        "eval_after": after.score if after else None,
        "eval_after_margin": after.margin if after else None,
        "eval_episodes": after.accepted if after else 0,
        "eval_failed": sum(evaluation.failed for evaluation in evaluations.values()),
        "train_episodes": train_episodes,
        "episodes_accepted": tally.train_accepted + tally.eval_accepted,
        "episodes_failed": tally.failed,
        "episodes_cancelled": tally.cancelled,
        "episodes_retried": tally.retries,
        "episodes_discarded": tally.left_out,
        "episodes_lost": tally.lost,
        "processes_restarted": restarts,
        "tokens_trained": report.tokens_trained,
        "episodes_per_s": train_episodes / seconds if seconds else 0.0,
        "train_seconds": seconds,
        "max_abs_dlogp": report.max_abs_dlogp,
        "mean_abs_dlogp": report.whole.at_lag_0.mean_abs,
        "sequences_per_episode": report.sequences_per_episode,
        "alignment": explain(report),
        "policy_version": loop.policy.version,
        "steps": loop.step,
        "seed": config.seed,
        **({"roles": roles} if roles else {}),
    }
