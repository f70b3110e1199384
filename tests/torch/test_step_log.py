"""The step log: what it holds, where it is written, and how little it asks of a caller."""

from __future__ import annotations

import json
import signal
import threading
import time

import pytest
import torch

from ringspun import Causal, Contiguous, Full, Window, Zigzag
from ringspun.core import ways
from ringspun.core.route.base import Action, MessageColumn
from ringspun.errors import PlanError, TransferError
from ringspun.steplog import FOLDER_VARIABLE, StepLog, What, dump, dump_on_signal
from ringspun.steplog.log import KEPT
from ringspun.torch import ContextParallel, Loopback
from ringspun.torch.drivers.place import module_words
from ringspun.torch.execution import wire_of


def tensors(tokens: int) -> list[torch.Tensor]:
    return [torch.ones(1, 2, tokens, 4, requires_grad=True) for _ in range(3)]


@pytest.mark.parametrize("backward", ["keys", "queries"])
@pytest.mark.parametrize("layout", [Contiguous(), Zigzag()], ids=str)
@pytest.mark.parametrize("mask", [Full(), Causal(), Window(3)], ids=str)
def test_a_log_holds_every_message_and_step_of_a_call(mask, layout, backward):
    """In the schedule's order, with the bytes that went over the wire."""
    ring = Loopback(4)
    plan = ContextParallel(ring, layout=layout, backward=backward).plan(18, mask)
    x, sent = tensors(18), 0
    plan.attention(*x).sum().backward()
    taken = ways.taken(plan.schedules, wire_of(*x), backward)
    for schedule, other, log in zip(plan.schedules, taken, ring.state.logs, strict=True):
        for call, (phase, one) in enumerate([(0, schedule.forward), (1, other.backward)]):
            rows = [r for r in log.rows if r.call == call]
            assert {r.phase for r in rows} == {phase}
            assert (rows[0].what, rows[-1].what) == (What.CALL, What.END)
            assert [r.step for r in rows if r.what == What.COMPUTE] == list(range(len(one)))
            posts = [r for r in rows if r.what in (What.SEND, What.RECEIVE)]
            found = [(r.step, r.moment, r.what - What.SEND, r.payload, r.peer, r.source) for r in posts]
            columns = [MessageColumn.STEP, MessageColumn.MOMENT, MessageColumn.ACTION, MessageColumn.PAYLOAD]
            told = one.messages[:, [*columns, MessageColumn.PEER, MessageColumn.SOURCE]]
            assert sorted(found) == sorted(map(tuple, told.tolist()))
            assert [w for w in (r.what for r in rows) if w == What.WAIT] == [What.WAIT] * sum(
                r.what == What.LANDED for r in rows
            )
            sent += sum(r.n_bytes for r in posts if r.what == What.SEND)
        times = [r.monotonic for r in log.rows]
        assert times == sorted(times)
    assert sent == sum(ring.counts.bytes.values())
    assert What.SEND + Action.RECEIVE == What.RECEIVE


def test_only_the_newest_rows_are_kept():
    log = StepLog("ring", (0, 1), 0)
    for n in range(3 * KEPT):
        log.note(n, 0, What.COMPUTE, 1)
    assert [r.call for r in log.rows] == list(range(2 * KEPT, 3 * KEPT))
    assert log.as_data()["full"]


def test_a_log_says_where_its_rank_is():
    log = StepLog("ring", (0, 1), 0)
    assert log.place == "before call 0"
    log.agree("the plan")
    assert log.place == "before call 0"
    log.note(3, 0, What.CALL)
    log.agree("the end of step 1")
    assert log.place == "in call 3 (forward)"
    log.note(3, 0, What.END)
    assert log.place == "after call 3 (forward)"
    log.note(4, 4, What.COMPUTE, 2)
    assert log.place == "in call 4 (backward of call 3)"


def test_a_dump_goes_where_the_environment_says_and_replaces_the_last(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "deep" / "er"))
    log = StepLog("ring of this test", (7, 4), 1)
    log.note(0, 0, What.CALL)
    first = dump()
    log.note(0, 0, What.END)
    assert dump(reason="again") == first and list(first.parent.iterdir()) == [first]
    told = json.loads(first.read_text())
    assert told["reason"] == "again"
    (mine,) = [x for x in told["logs"] if x["ring"] == "ring of this test"]
    assert mine["ranks"] == [7, 4] and mine["ring_rank"] == 1 and len(mine["rows"]) == 2
    monkeypatch.delenv(FOLDER_VARIABLE)
    monkeypatch.chdir(tmp_path)
    assert dump().resolve().parent == tmp_path


class Broken(Loopback):
    def deliver(self, sender, receiver, sent, wanted):
        raise TransferError("the link is cut")


@pytest.mark.parametrize("given", ["argument", "environment", "nothing", "a file"])
def test_an_error_leaves_a_log_where_there_is_a_folder(tmp_path, monkeypatch, given):
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    if given == "environment":
        monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    (tmp_path / "file").write_text("")
    folder = {"argument": tmp_path, "a file": tmp_path / "file"}.get(given)
    plan = ContextParallel(Broken(2), log_dir=folder).plan(4, Full())
    with pytest.raises(TransferError, match="the link is cut") as caught:
        plan.attention(*tensors(4))
    notes = getattr(caught.value, "__notes__", [])
    files = list(tmp_path.glob("ringspun-*.json"))
    if given in ("argument", "environment"):
        assert notes == [f"step log: {files[0]}. Run `ringspun explain-hang`."]
        assert json.loads(files[0].read_text())["failure"] == "TransferError: the link is cut"
    else:
        assert files == [] and [n[:22] for n in notes] == ["step log not written: "] * (given == "a file")


def test_a_signal_reaches_every_reader(tmp_path):
    """The dump, the handler that was there, and the descriptor that was there."""
    import os

    heard: list[int] = []
    theirs, written = os.pipe()
    os.set_blocking(written, False)
    before = signal.signal(signal.SIGUSR2, lambda number, frame: heard.append(number))
    fd = signal.set_wakeup_fd(written)
    try:
        dump_on_signal(tmp_path, signal.SIGUSR2)
        log = StepLog("ring", (0, 1), 0)
        log.note(0, 0, What.CALL)
        os.kill(os.getpid(), signal.SIGUSR2)
        until = time.monotonic() + 5
        while not list(tmp_path.glob("*.json")) and time.monotonic() < until:
            time.sleep(0.005)
        assert os.read(theirs, 1) == bytes([signal.SIGUSR2])
        assert heard == [signal.SIGUSR2]
        assert json.loads(next(tmp_path.glob("*.json")).read_text())["reason"] == "signal SIGUSR2"
    finally:
        signal.set_wakeup_fd(fd)
        signal.signal(signal.SIGUSR2, before)


def test_a_signal_is_asked_for_in_the_main_thread(tmp_path):
    found: list[type] = []

    def elsewhere() -> None:
        try:
            dump_on_signal(tmp_path, signal.SIGUSR2)
        except ValueError as problem:
            found.append(type(problem))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == [ValueError]


def test_a_ring_of_one_is_in_no_dump(tmp_path):
    ContextParallel(alone := Loopback(1)).plan(4, Full()).attention(*tensors(4))
    told = json.loads(dump(tmp_path).read_text())
    assert alone.state.logs[0].ring not in {x["ring"] for x in told["logs"]}


@pytest.mark.parametrize("wrong", [1, b"logs", True])
def test_a_folder_is_a_path(wrong):
    with pytest.raises(PlanError, match="log_dir must be a path; got "):
        ContextParallel(Loopback(2), log_dir=wrong)


@pytest.mark.parametrize("wrong", [1, "yes", None])
def test_sync_steps_is_yes_or_no(wrong):
    with pytest.raises(PlanError, match="sync_steps must be True or False"):
        ContextParallel(Loopback(2), sync_steps=wrong)


class Inner(torch.nn.Module):
    def forward(self) -> str:
        return module_words()


class Outer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Identity(), Inner()])

    def forward(self) -> str:
        return self.layers[1]()


def test_the_module_that_is_running_is_named():
    """The innermost, by its name in the outermost."""
    assert module_words() == ""
    assert Inner()() == ", in Inner"
    assert Outer()() == ", in layers.1 of Outer"
