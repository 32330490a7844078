from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve_engine.control import Order
from specserve_engine.sglang import journal
from specserve_engine.sglang.policy import MAX_LAUNCHES, ForcePolicy
from specserve_engine.wire import AUTO, Mode, Setting, Tier

OFF = Setting(Mode.OFF)
ON = Setting(Mode.ON, 3)
TIERS = Setting(Mode.TIERS, tiers=(Tier(1, 3), Tier(8, 1), Tier(32, 0)))


class Own:
    """The engine's own policy: 1 step, and a wish to go to 3 after each result."""

    def __init__(self):
        self.candidate_steps = [0, 1, 3]
        self.fed = []
        self.sizes = None

    def set_cuda_graph_bs(self, cuda_graph_bs):
        self.sizes = cuda_graph_bs

    def get_steps_for_batch(self, batch_size):
        return min(batch_size, 1)

    def on_verify_complete(self, num_correct_drafts_per_req, batch_size):
        self.fed.append((tuple(num_correct_drafts_per_req), batch_size))
        return 3

    def cuda_graph_bs_for_step(self, step):
        return [step]

    def something_newer(self):
        return "newer"


class Engine:
    """Calls a policy as the adaptive controller does, on a clock of its own."""

    def __init__(self):
        self.now = 100.0
        self.passes = 0
        self.own = Own()
        self.policy = ForcePolicy(self.own, lambda: self.passes, lambda: self.now)

    def launch(self, batch):
        self.passes += 1
        return self.policy.get_steps_for_batch(batch)

    def finish(self, correct):
        return self.policy.on_verify_complete(correct, len(correct))

    def rounds(self, count, batch, correct=0, seconds=0.01):
        for _ in range(count):
            self.launch(batch)
            self.now += seconds
            self.finish([correct] * batch)


@pytest.fixture
def engine():
    return Engine()


def test_without_an_order_the_engines_own_policy_decides(engine):
    assert engine.launch(4) == 1
    assert engine.finish([0, 1, 0, 1]) == 3
    assert engine.own.fed == [((0, 1, 0, 1), 4)]


@pytest.mark.parametrize(
    ("setting", "expected"),
    [(OFF, [0, 0, 0, 0]), (ON, [3, 3, 3, 3]), (TIERS, [3, 1, 1, 0])],
)
def test_a_forced_setting_decides_by_batch_alone(engine, setting, expected):
    engine.policy.obey(Order(1, setting))
    assert [engine.launch(batch) for batch in (1, 8, 31, 32)] == expected


def test_a_result_under_way_brings_no_old_steps_back(engine):
    engine.launch(2)
    engine.policy.obey(Order(1, OFF))
    assert engine.finish([1, 1]) is None
    assert engine.own.fed == []


def test_auto_again_asks_the_engine_again(engine):
    engine.policy.obey(Order(1, OFF))
    engine.policy.obey(Order(2, AUTO))
    assert engine.launch(2) == 1
    assert engine.finish([1, 1]) == 3


def test_rounds_are_counted_for_the_order_they_were_launched_under(engine):
    engine.launch(2)
    engine.policy.obey(Order(1, ON))
    engine.launch(2)  # overlap: launched before the last result is there
    engine.finish([0, 0])
    assert engine.policy.decode_rounds == 0
    engine.finish([3, 3])
    assert engine.policy.decode_rounds == 1
    cells = {(cell.steps, cell.tokens) for cell in engine.policy.stats.figures(engine.now)}
    assert cells == {(1, 2), (3, 8)}


def test_an_order_is_obeyed_from_the_first_launch_on(engine):
    engine.policy.obey(Order(1, ON))
    assert engine.policy.obeyed_at is None
    engine.now = 123.0
    engine.launch(2)
    assert engine.policy.obeyed_at == 123.0
    engine.now = 123.5
    engine.policy.switched()  # the state was swapped for this launch
    assert engine.policy.obeyed_at == 123.5
    engine.now = 130.0
    engine.launch(2)
    engine.policy.switched()
    assert (engine.policy.obeyed_at, engine.policy.switches) == (123.5, 2)


def test_an_idle_batch_is_no_round(engine):
    engine.policy.obey(Order(1, TIERS))
    assert engine.launch(0) == 3
    assert engine.policy.obeyed_at is None
    assert engine.policy.last_batch == 0
    engine.finish([])
    assert engine.policy.stats.rounds_total == 0


def test_only_rounds_without_a_prefill_between_are_timed(engine):
    engine.policy.obey(Order(1, ON))
    engine.rounds(10, 4)
    engine.passes += 1  # a prefill
    engine.rounds(1, 4, seconds=5.0)
    (cell,) = engine.policy.stats.figures(engine.now)
    assert cell.rounds == 11
    assert cell.p95 == pytest.approx(0.01)


def test_a_lost_result_does_not_shift_the_others(engine):
    engine.policy.obey(Order(1, ON))
    engine.launch(5)  # its result never comes
    engine.policy.obey(Order(2, OFF))
    engine.launch(2)
    engine.finish([0, 0])
    (cell,) = engine.policy.stats.figures(engine.now)
    assert (cell.batch_bucket, cell.steps) == (2, 0)


def test_results_without_a_launch_are_not_counted(engine):
    engine.finish([1])
    assert engine.policy.stats.rounds_total == 0


def test_launches_do_not_pile_up(engine):
    for _ in range(10 * MAX_LAUNCHES):
        engine.launch(3)
    assert len(engine.policy._launches) == MAX_LAUNCHES


def test_what_else_sglang_asks_goes_to_its_own_policy(engine):
    assert engine.policy.candidate_steps == [0, 1, 3]
    assert engine.policy.cuda_graph_bs_for_step(3) == [3]
    engine.policy.set_cuda_graph_bs([1, 2])
    assert engine.own.sizes == [1, 2]
    assert engine.policy.something_newer() == "newer"


@given(
    orders=st.lists(
        st.tuples(st.sampled_from([AUTO, OFF, ON, TIERS]), st.integers(1, 40)), max_size=30
    )
)
def test_ranks_that_get_the_same_orders_choose_alike(orders):
    ranks = [Engine(), Engine()]
    ranks[1].now += 17  # a rank's clock decides nothing
    for epoch, (setting, batch) in enumerate(orders, start=1):
        for rank in ranks:
            rank.policy.obey(Order(epoch, setting))
        assert len({rank.launch(batch) for rank in ranks}) == 1


def test_a_round_costs_microseconds(engine):
    """The bound is 1 % of the shortest round measured on a GPU, 5 ms."""
    engine.policy.obey(Order(1, ON))
    rounds = 20_000
    correct = [1] * 64
    began = time.thread_time()
    for _ in range(rounds):
        engine.launch(64)
        engine.finish(correct)
    assert (time.thread_time() - began) / rounds < 50e-6


def test_a_record_of_ten_thousand_switches_keeps_the_last():
    record = [("update_server_args", {"a": 1})]
    for steps in range(10_000):
        record.append((journal.SOURCE, {"speculative_num_steps": steps}))
        journal.compact(record)
    assert record == [
        ("update_server_args", {"a": 1}),
        (journal.SOURCE, {"speculative_num_steps": 9_999}),
    ]


def test_compacting_keeps_what_is_not_a_switch_in_order():
    record = [(journal.SOURCE, 1), ("x", 1), (journal.SOURCE, 2), ("y", 2), (journal.SOURCE, 3)]
    journal.compact(record)
    assert record == [("x", 1), ("y", 2), (journal.SOURCE, 3)]


def test_records_are_found_in_every_version():
    old = SimpleNamespace(_runtime_mutations=[1], _resolved_overrides=None)
    context = SimpleNamespace(_overrides_log=[2])
    assert journal.records(old, None) == [[1]]
    assert journal.records(None, context) == [[2]]
