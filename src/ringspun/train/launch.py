"""From one command to the ranks of a job: starts them here, or joins those that `torchrun` started."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import distributed as dist

from ringspun.core.host import cores
from ringspun.core.text import parse_layout
from ringspun.errors import ConfigError, LaunchError
from ringspun.train import checkpointing
from ringspun.train.config import TrainConfig
from ringspun.train.data import Corpus
from ringspun.train.loop import Hooks, Run, find_checkpoint, train
from ringspun.train.mesh import Mesh

_TIMEOUT_S = 600
T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """What every rank is told; plain data, for it travels to other processes.

    Args:
        config: the run; its `ranks` are the processes to start.
        corpus: the files, found and checked already.
        fresh: move an old output folder aside instead of going on from its last checkpoint.
        prove: compare the ring with one process at the end.
        hooks: see `ringspun.train.loop.Hooks`; functions of a module, so that they can travel.
    """

    config: TrainConfig
    corpus: Corpus
    fresh: bool = False
    prove: bool = False
    hooks: Hooks = field(default_factory=Hooks)


def launch(job: Job) -> None:
    """Runs `job` to its end on as many ranks as its config says.

    Raises:
        RingspunError: what is wrong with the job, found before any rank starts.
        LaunchError: a rank failed; the message is that rank's own.
    """
    if not job.fresh:
        find_checkpoint(job.config, job.corpus, warn=_silent)
    # Read by the profiler's library at its first use; the started ranks inherit it.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    if _joined():
        _check_world(job)
        work(job)
    elif job.config.ranks == 1:
        work(job)
    else:
        start_ranks(job.config.ranks, work, job, logs=job.config.output)


def work(job: Job) -> None:
    """One rank of the job: in a process group where the environment describes one, else alone."""
    from ringspun.torch import ContextParallel
    from ringspun.train.proof import prove

    torch.set_num_threads(max(1, cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    if _joined():
        dist.init_process_group("gloo", timeout=timedelta(seconds=_TIMEOUT_S))
    try:
        group = dist.group.WORLD if _joined() else None
        context = ContextParallel(group, layout=parse_layout(job.config.layout), timeout_s=_TIMEOUT_S)
        run = Run(job.config, job.corpus, context, Mesh(group), job.hooks)
        _settle_output(job, run.mesh)
        state = train(run)
        if job.prove:
            prove(run, state)
    finally:
        if _joined():
            dist.destroy_process_group()


def _joined() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def _check_world(job: Job) -> None:
    world = int(os.environ["WORLD_SIZE"])
    if world != job.config.ranks:
        raise ConfigError(
            f"ranks must be the {world} processes that torchrun started; got {job.config.ranks}. "
            f"Set ranks = {world}, or pass --ranks {world}."
        )


def _settle_output(job: Job, mesh: Mesh) -> None:
    if job.fresh and mesh.rank == 0 and (moved := checkpointing.move_aside(job.config.output)):
        print(f"the old {job.config.output} is now {moved}")
    mesh.gather([0.0])  # nobody looks for a checkpoint before that


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

    for name in ("torch.distributed.elastic", "torch.multiprocessing"):
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
            return dict(elastic_launch(plan, function)(*args))
    except ChildFailedError as problem:
        raise LaunchError(_explain(problem.failures, logs)) from None


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
    heavy = ["ringspun.torch", "ringspun.train.proof", "transformers.models.llama.modeling_llama"]
    multiprocessing.set_forkserver_preload(heavy)
    return "forkserver"


def _explain(failures: dict[int, Any], logs: Path) -> str:
    """The failure that came first, in its own words; the call stack goes into a file."""
    rank, first = min(failures.items(), key=lambda item: (not _killed(item[1]), item[1].timestamp))
    message = first.message
    if isinstance(message, dict):
        stack = str(message.get("extraInfo", {}).get("py_callstack", ""))
        logs.mkdir(parents=True, exist_ok=True)
        (logs / "failure.txt").write_text(f"rank {rank}\n{stack}", encoding="utf-8")
        message = f"{message['message']} (call stack: {logs / 'failure.txt'})"
    return f"rank {rank} failed: {message}"


def _killed(failure: Any) -> bool:
    """Whether a signal ended it, but for the launcher's own SIGTERM; others' complaints follow from that."""
    return bool(failure.exitcode < 0 and failure.exitcode != -15)


def _silent(_: str) -> None:
    pass
