"""From one command to the ranks of a job: starts them here, or joins those that `torchrun` started."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import distributed as dist

from ringspun.core.host import cores, end_with_parent
from ringspun.core.text import parse_layout
from ringspun.errors import ConfigError, LaunchError, PeerError, RingBroken, RingspunError
from ringspun.steplog import FOLDER_VARIABLE, dump_on_signal
from ringspun.train.checkpoints.checkpointing import tidy
from ringspun.train.checkpoints.resume import find_checkpoint
from ringspun.train.config import TrainConfig
from ringspun.train.data.text import TrainingData
from ringspun.train.data.vocabulary import model_vocabulary
from ringspun.train.held_out import check_held_out
from ringspun.train.loop import Hooks, Run, train_stages
from ringspun.train.model import check_rotations, route_of
from ringspun.train.output import CHECKPOINTS, claimed
from ringspun.train.parallel.meshes import JobMesh, check_sizes, make_mesh
from ringspun.train.parallel.ranks import Mesh
from ringspun.train.recipe import Recipe
from ringspun.train.reporting.run_page import drawn_on_failure
from ringspun.train.stages import Leg

_TIMEOUT_S = 600
_CAUSE_FIRST_S = 2.0
T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """What every rank is told; plain data, for it travels to other processes.

    Args:
        config: the run; its `processes` are started.
        corpus: what it trains on, found and checked already.
        fresh: move an old output folder aside instead of going on from its last checkpoint.
        prove: compare the ring with one process at the end.
        hooks: see `ringspun.train.loop.Hooks`; functions of a module, so that they can travel.
        recipe: likewise; None: what the config names, read by each rank.
    """

    config: TrainConfig
    corpus: TrainingData
    fresh: bool = False
    prove: bool = False
    hooks: Hooks = field(default_factory=Hooks)
    recipe: Recipe | None = None


def launch(job: Job) -> None:
    """Runs `job` to its end on as many ranks as its config says.

    Raises:
        RingspunError: what is wrong with the job, found before any rank starts.
        LaunchError: a rank failed; the message is that rank's own.
    """
    check(job)
    # Read by the profiler's library at its first use; the started ranks inherit it.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    if joined():
        _check_world(job)
        with process_group():
            _join(job, _mesh())
        return
    with claimed(job.config.output, fresh=job.fresh, say=print):
        tidy(job.config.output / CHECKPOINTS)
        find_checkpoint(job.config, job.corpus, warn=_silent)
        if job.config.processes == 1 and not job.config.needs_mesh:
            work(job)
        else:
            with drawn_on_failure(job.config.output):
                start_ranks(job.config.processes, work, job, logs=job.config.output)


def check(job: Job) -> None:
    """Looks at what a job names before any rank starts: its recipe, its checkpoint, the rotations of each stage, what
    it is to evaluate on.

    Raises:
        ConfigError: what is wrong. UnsupportedByRing: rotations that do not fit the model.
    """
    config = job.config
    recipe = Recipe.of(config) if job.recipe is None else job.recipe
    if job.prove and (config.model is None or config.recipe is not None):
        raise ConfigError("prove must be of a run without init and recipe. Leave it out.")
    model_vocabulary(config)
    check_rotations(config, recipe)
    if config.evaluate is not None:
        also = "; a recipe's own evaluate needs no [evaluate]" if recipe.evaluate is not None else ""
        check_held_out(config, job.corpus, also=also)


def work(job: Job) -> None:
    """One rank of the job: in a process group where the environment describes one, else alone.

    The output is the caller's to claim; see `ringspun.train.output`.
    """
    with process_group():
        _train(job, _mesh())


@contextmanager
def process_group() -> Iterator[None]:
    """The default group that the environment describes, or none. Nobody may hold it when it is destroyed."""
    if not joined():
        yield
        return
    if os.environ.get(FOLDER_VARIABLE):
        dump_on_signal()
    dist.init_process_group("gloo", timeout=timedelta(seconds=_TIMEOUT_S))
    try:
        yield
    finally:
        dist.destroy_process_group()


def _mesh() -> Mesh:
    """The ranks of the job; made where it is used, for a group that is held cannot be destroyed cleanly."""
    return Mesh(dist.group.WORLD if joined() else None)


def _train(job: Job, mesh: Mesh) -> None:
    from ringspun.train.proof import prove

    torch.set_num_threads(max(1, cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    recipe = Recipe.of(job.config) if job.recipe is None else job.recipe
    run, state = train_stages(job.config, job.corpus, mesh, partial(_run, job, mesh, recipe))
    if job.prove:
        prove(run, state)


def _run(job: Job, mesh: Mesh, recipe: Recipe, leg: Leg) -> Run:
    """One stage, with the mesh and the ring that it has to itself. Collective."""
    from ringspun.torch import ContextParallel

    config = leg.config
    devices = _devices(config) if job.config.needs_mesh else None
    context = ContextParallel(
        mesh.group if devices is None else devices.context,
        layout=parse_layout(config.layout),
        route=route_of(config),
        timeout_s=_TIMEOUT_S,
    )
    return Run(config, job.corpus, context, mesh, devices, job.hooks, recipe, job.config, leg.number)


def _devices(config: TrainConfig) -> JobMesh:
    return make_mesh(
        dp_replicate=config.dp_replicate,
        dp_shard=config.dp_shard,
        ring=config.ranks // config.ulysses,
        ulysses=config.ulysses,
    )


def joined() -> bool:
    """Whether the environment describes a job that this process is a rank of."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def _check_world(job: Job) -> None:
    world, config = int(os.environ["WORLD_SIZE"]), job.config.legs[0].config
    if config.data_size > 1:
        sizes = {"dp_replicate": config.dp_replicate, "dp_shard": config.dp_shard, "ranks": config.ranks}
        check_sizes(sizes, world)
    if world != config.ranks * config.data_size:
        raise ConfigError(
            f"ranks must be the {world} processes that torchrun started; got {config.ranks}. "
            f"Set ranks = {world}, or pass --ranks {world}."
        )


def _join(job: Job, mesh: Mesh) -> None:
    """A rank that torchrun started: rank 0 claims the output for all, and no rank goes on without it."""
    with ExitStack() as stack:
        problem: RingspunError | None = None
        if mesh.rank == 0:
            try:
                stack.enter_context(claimed(job.config.output, fresh=job.fresh, say=print))
                tidy(job.config.output / CHECKPOINTS)
            except RingspunError as found:
                problem = found
        refused = mesh.gather([float(problem is not None)])[0][0]
        if problem is not None:
            raise problem
        if refused:
            raise LaunchError(f"output must be free; rank 0 says why {job.config.output} is not.")
        _train(job, mesh)


def start_ranks(ranks: int, function: Callable[..., T], *args: Any, logs: Path) -> dict[int, T]:
    """Calls ``function(*args)`` in `ranks` new processes of this machine, through torch's elastic launcher.

    Args:
        ranks: processes to start; each finds RANK, WORLD_SIZE and the rest in its environment.
        function: of a module; it and `args` travel to the processes.
        args: what it is called with.
        logs: folder that gets `failure.txt`, the call stack of a rank that failed.

    Returns:
        What each rank returned, by rank.

    Raises:
        LaunchError: a rank failed; the others were stopped. The message is that rank's own.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    elastic = "torch.distributed.elastic"  # some of its loggers have a level of their own
    for name in (elastic, f"{elastic}.agent.server.api", f"{elastic}.multiprocessing.api", "torch.multiprocessing"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # a failed rank's message is told below, once
    plan = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        start_method=_start_method(),
    )
    try:
        with _signals_restored():
            return dict(elastic_launch(plan, _on_rank)(function, *args))
    except ChildFailedError as problem:
        raise LaunchError(_explain(problem.failures, logs)) from None


def _on_rank(function: Callable[..., T], *args: Any) -> T:
    """A rank's life, which ends with that of the launching process."""
    end_with_parent()
    try:
        return function(*args)
    except Exception as problem:
        if _follows(type(problem).__name__, str(problem)):
            time.sleep(_CAUSE_FIRST_S)  # the launcher hears of one failure only, the first to end a process
        raise


def _follows(kind: str, text: str) -> bool:
    """Whether a failure is one rank's complaint that another has failed."""
    return kind in (PeerError.__name__, RingBroken.__name__) or kind.startswith("Dist") or "gloo" in text


@contextmanager
def _signals_restored() -> Iterator[None]:
    """Undoes the launcher's signal handlers, which outlive it; a signal ends this program as it would have."""
    from torch.distributed.elastic.multiprocessing.api import SignalException

    taken = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    before = [(number, signal.getsignal(number)) for number in taken]
    try:
        yield
    except SignalException as problem:
        if problem.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise SystemExit(128 + int(problem.sigval)) from None
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before:
                signal.signal(number, handler)


def _start_method() -> str:
    """A server that has imported the heavy packages once and forks each rank, where the system has such."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return "spawn"
    # torch._dynamo is what the first call of any custom op imports: seconds, on every rank anew.
    heavy = ["ringspun.torch", "ringspun.train.proof", "transformers.models.llama.modeling_llama", "torch._dynamo"]
    multiprocessing.set_forkserver_preload(heavy)
    return "forkserver"


def _explain(failures: dict[int, Any], logs: Path) -> str:
    """The failure that caused the others, in its own words; the call stack goes into a file."""
    rank, first = min(failures.items(), key=lambda item: _order(item[1]))
    message = first.message
    if isinstance(message, dict):
        stack = str(message.get("extraInfo", {}).get("py_callstack", ""))
        place = _written(logs / "failure.txt", f"rank {rank}\n{stack}")
        message = f"{message['message']} ({place})"
    return f"rank {rank} failed: {message}"


def _written(path: Path, stack: str) -> str:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(stack, encoding="utf-8")
    except OSError as problem:  # a full disk, say: it must not hide what ended the rank
        return f"call stack not written: {problem.strerror}"
    return f"call stack: {path}"


def _order(failure: Any) -> tuple[bool, bool, float]:
    """The cause first: what a signal ended, then what failed by itself, then complaints about others; by time."""
    told = failure.message["message"] if isinstance(failure.message, dict) else ""
    kind, _, text = str(told).partition(": ")
    return not _killed(failure), _follows(kind, text), failure.timestamp


def _killed(failure: Any) -> bool:
    """Whether a signal ended it, but for the launcher's own SIGTERM; others' complaints follow from that."""
    return bool(failure.exitcode < 0 and failure.exitcode != -15)


def _silent(_: str) -> None:
    pass
