"""Why SGLang ended, from its log to the condition of the SpecServe."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from specserve import observed
from specserve_engine.sglang import last_words
from specserve_engine.sglang.last_words import MOST
from tests.unit.test_observed import container, ended, pod, waiting
from tests.unit.test_status import condition, seen
from tests.unit.test_status import pod as seen_pod

AT = '  File "/sgl-workspace/sglang/python/sglang/srt'
START = f"""Traceback (most recent call last):
{AT}/managers/scheduler.py", line 6362, in run_scheduler_process
    scheduler = Scheduler(server_args, port_args)
                ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
{AT}/managers/scheduler.py", line 568, in __init__
    self.init_model_worker()
"""
DRAFT = f"""{START}{AT}/managers/scheduler.py", line 1133, in init_model_worker
    self.maybe_init_draft_worker()
{AT}/managers/scheduler.py", line 1064, in maybe_init_draft_worker
    self.draft_worker = DraftWorkerClass(**draft_worker_kwargs)
                        ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
{AT}/speculative/eagle_worker_v2.py", line 1336, in __init__
    EagleDraftWorker(
"""
LOADING = f"""{AT}/models/llama.py", line 777, in _legacy_load_weights
    weight_loader(param, loaded_weight)
"""
MISFIT = "RuntimeError: The size of tensor a (32) must match the size of tensor b (64)"
DRAFT_GRAPHS = f"""{START}{AT}/managers/scheduler.py", line 1126, in init_all_cuda_graphs
    self.draft_worker.init_cuda_graphs()
{AT}/speculative/eagle_worker_v2.py", line 286, in init_cuda_graphs
    self._draft_worker.init_cuda_graphs()
"""
TARGET_GRAPHS = f"""{START}{AT}/managers/scheduler.py", line 1124, in init_all_cuda_graphs
    self.tp_worker.init_cuda_graphs()
"""
UNDER_LOAD = f"""Traceback (most recent call last):
{AT}/managers/scheduler.py", line 6368, in run_scheduler_process
    scheduler.run_event_loop()
{AT}/speculative/eagle_worker_v2.py", line 1450, in forward_batch_generation
    draft_input = self.draft_worker.draft(batch)
"""
FAILED = "Exception: Capture cuda graph failed: mat1 and mat2 shapes"
ADVICE = f"{FAILED}\nPossible solutions:\n1. x\n"


@pytest.fixture
def place(tmp_path) -> Iterator[Path]:
    """The file that a container is given for its last words."""
    logger = logging.getLogger("sglang")
    before = list(logger.handlers)
    file = tmp_path / "termination-log"
    file.touch()
    last_words.listen(file)
    yield file
    logger.handlers[:] = before


def log(text: str, name: str = "sglang.srt.managers.scheduler") -> None:
    logging.getLogger(name).error(text)


def told(words: str, exit_code: int = 0, reason: str = "Completed") -> observed.Trouble:
    """What is said of an engine that crashed so."""
    back_off = waiting("CrashLoopBackOff", lastState=ended(reason, exit_code, words))
    trouble = observed.pod(pod(ready=False, containerStatuses=[back_off])).trouble
    assert trouble is not None
    return trouble


# -- what is left ---------------------------------------------------------------------------


def test_the_first_exception_is_left_and_nothing_else(place):
    log("Received sigquit from a child process. It usually means the child failed.")
    log("a client said: Scheduler hit an exception: no", name="elsewhere")
    assert place.read_text() == ""
    log(f"Scheduler hit an exception: {DRAFT}{LOADING}{MISFIT}\n")
    assert place.read_text() == f"{DRAFT}{LOADING}{MISFIT}"
    log("Scheduler hit an exception: Traceback: the other rank")
    log("kill_process_tree called: parent_pid=1")
    assert place.read_text() == f"{DRAFT}{LOADING}{MISFIT}"


def test_a_long_one_keeps_both_ends_and_fits(place):
    log(f"Scheduler hit an exception: {DRAFT}{LOADING * 100}{MISFIT}é\n")
    left = place.read_bytes()
    assert len(left) <= MOST
    assert told(left.decode()).reason == "DraftRejected"
    assert f"exit code 0: {MISFIT}é; it ended while" in told(left.decode()).message


def test_where_there_is_no_such_file_none_is_made(place):
    place.unlink()
    log("Scheduler hit an exception: Traceback")
    assert not place.exists()


# -- what it becomes ------------------------------------------------------------------------

CASES = {
    "the draft's weights": (f"{DRAFT}{LOADING}{MISFIT}", "DraftRejected", MISFIT),
    "the draft's graphs": (f"{DRAFT_GRAPHS}{ADVICE}", "DraftRejected", FAILED),
    "an assertion without words": (f"{DRAFT}AssertionError", "DraftRejected", "AssertionError"),
    "its memory": (
        f"{DRAFT}torch.OutOfMemoryError: CUDA out of memory. Tried",
        "OutOfGpuMemory",
        "torch.OutOfMemoryError: CUDA out of memory.",
    ),
    "the target's weights": (f"{START}{LOADING}{MISFIT}", "CrashLooping", MISFIT),
    "the target's graphs": (f"{TARGET_GRAPHS}{MISFIT}", "CrashLooping", MISFIT),
    "a batch": (f"{UNDER_LOAD}{MISFIT}", "CrashLooping", MISFIT),
    "the second of two": (
        f"{UNDER_LOAD}KeyError: 1\n\nDuring handling of that:\n\n{UNDER_LOAD}ValueError: 2",
        "CrashLooping",
        "ValueError: 2",
    ),
    "no exception's name": (f"{UNDER_LOAD}SystemExit: 3", "CrashLooping", "SystemExit: 3"),
    "words about it": (f"maybe_init_draft_worker\n{MISFIT}", "CrashLooping", MISFIT),
}


@pytest.mark.parametrize(("words", "reason", "said"), CASES.values(), ids=CASES)
def test_where_it_ended_decides_and_what_it_said_is_told(words, reason, said):
    trouble = told(words)
    assert trouble.reason == reason
    assert f"ended with Completed, exit code 0: {said}" in trouble.message
    assert ("does draft fit model" in trouble.message) is (reason == "DraftRejected")


STATES = {
    "just ended": container(state=ended("Completed", 0, f"{DRAFT}{MISFIT}")),
    "loading again": container(
        ready=False, restartCount=1, lastState=ended("Completed", 0, f"{DRAFT}{MISFIT}")
    ),
}


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_it_is_told_from_the_first_end_on(state):
    trouble = observed.pod(pod(ready=False, containerStatuses=[state])).trouble
    assert trouble is not None
    assert (trouble.reason, MISFIT in trouble.message) == ("DraftRejected", True)


def test_the_condition_carries_it():
    rejected = seen_pod("chat-1", trouble=told(f"{DRAFT}{MISFIT}"))
    other = seen_pod("chat-0", trouble=observed.Trouble("CrashLooping", "for want of it"))
    told_so = condition(seen(pods=[other, rejected]), "Ready")
    assert told_so[:2] == ("False", "DraftRejected")
    assert MISFIT in told_so[2]
