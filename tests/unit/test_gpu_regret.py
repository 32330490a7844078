"""The pure parts of the benchmark on a GPU: its plan, its counting, its table, its draws."""

import itertools
import json

import pytest

from tests.gpu import cells, plan, show
from tests.gpu.host import Host
from tests.gpu.plugins.simulated_acceptance import Draws
from tests.gpu.tally import Stream, Tally, rate

FLEET = {
    "kind": cells.FLEET,
    "id": "a",
    "at": "2026-11-30T09:00:00Z",
    "simulated": False,
    "gpu": "NVIDIA H200",
    "tp": 1,
    "link": "none",
    "sglang": "0.5.16",
    "machine": {"cores": 16, "processor": "Some Processor", "memoryGiB": 128.0, "kernel": "6.18"},
    "versions": {"python": "3.12.3", "sglang": "0.5.16"},
    "curve": "h200-a",
    "clients": cells.TOGETHER,
    "traffic": {"promptTokens": 128, "answerTokens": 256, "capacity": 256},
    "windowSeconds": 10.0,
    "started": {"live": 100.0, "base": 99.0},
    "failed": {"engineDefault": "exit status 1"},
}


def window(arm, rate, *, c=70, accept=2.5, fleet="a"):
    server = plan.LIVE if arm in (plan.ON, plan.OFF, plan.SPECSERVE) else arm
    return {
        "kind": cells.WINDOW,
        "fleet": fleet,
        "server": server,
        "c": c,
        "accept": None if server == plan.BASE else accept,
        "arm": arm,
        "at": "2026-11-30T09:10:00Z",
        "seconds": 10.0,
        "settledSeconds": 5.0,
        "lost": 0,
        "tokensPerSecond": rate,
        "drafted": 1.0,
        "switches": 0,
    }


WINDOWS = [
    *(window(plan.OFF, rate) for rate in (900.0, 910.0)),
    *(window(plan.OFF, rate, accept=1.0) for rate in (905.0,)),
    *(window(plan.ON, rate) for rate in (1200.0, 1210.0, 1190.0)),
    *(window(plan.SPECSERVE, rate) for rate in (1180.0, 1200.0, 1190.0)),
    window(plan.BASE, 1000.0),
]


class TestPlan:
    def test_all_cells_are_planned_each_level_with_the_server_without_a_draft(self):
        planned = plan.blocks()
        places = [(b.clients, b.accept) for b in planned if b.server == plan.LIVE]
        assert sorted(places) == list(itertools.product(plan.CLIENTS, plan.ACCEPTS))
        assert {b.clients for b in planned if b.server == plan.BASE} == set(plan.CLIENTS)

    def test_every_cell_has_windows_of_the_policy_and_each_level_of_off(self):
        live = [block for block in plan.blocks() if block.server == plan.LIVE]
        for level in plan.CLIENTS:
            mine = [block for block in live if block.clients == level]
            assert {block.arms.count(plan.SPECSERVE) for block in mine} == {plan.REPEATS}
            assert sum(block.arms.count(plan.OFF) for block in mine) == plan.REPEATS

    def test_the_policy_always_takes_over_from_on(self):
        for block in plan.blocks():
            if plan.SPECSERVE in block.arms:
                assert block.arms[block.arms.index(plan.SPECSERVE) - 1] == plan.ON

    def test_blocks_are_named_by_clients_and_what_is_measured(self):
        found = plan.blocks("32@3.5,32@1,32@base,32@table")
        assert [(each.server, each.clients, each.accept) for each in found] == [
            (plan.LIVE, 32, 3.5),
            (plan.LIVE, 32, 1.0),
            (plan.BASE, 32, None),
            (plan.DEFAULT, 32, plan.DEFAULT_ACCEPT),
        ]

    def test_what_was_measured_is_not_measured_again(self):
        block = plan.live(70, 2.5)
        assert block.left([], "a") == block.arms
        assert block.left(WINDOWS[:1], "a") == block.arms[1:]
        assert block.left([window(arm, 1.0) for arm in block.arms], "a") == ()

    def test_a_block_is_not_shared_by_two_starts_of_the_servers(self):
        block = plan.live(70, 2.5)
        assert block.left(WINDOWS[:1], "b") == block.arms

    def test_a_block_that_another_start_has_finished_is_done(self):
        block = plan.live(70, 2.5)
        assert block.left([window(arm, 1.0) for arm in block.arms], "b") == ()

    def test_more_windows_than_wanted_are_no_harm(self):
        assert plan.plain(70).left([window(plan.BASE, 1.0)] * 3, "a") == ()

    @pytest.mark.parametrize(("left", "count"), [(0.0, 0), (10.9, 0), (11.1, 1), (1e9, 8)])
    def test_as_many_windows_as_fit(self, left, count):
        arms = plan.live(70, 2.5).arms
        assert plan.fitting(arms, 10.0, left) == arms[:count]

    def test_what_is_missing_is_told_by_arm(self):
        done = [window(plan.OFF, 1.0)]
        assert plan.missing(done, [plan.live(70, 2.5)]) == [
            "live with 70 clients at acceptance 2.5: 1 x off, 3 x on, 3 x specserve"
        ]


class TestTally:
    def test_tokens_told_together_came_one_after_another(self):
        tally = Tally()
        stream = Stream(tally)
        stream.heard(1, 10.0)
        stream.heard(17, 12.0)
        stream.heard(33, 14.0)
        assert tally.between(0.0, 20.0) == 33
        assert tally.between(11.0, 13.0) == 16
        assert tally.between(10.0, 12.0) == 16  # the first came at 10.0 itself

    def test_windows_side_by_side_count_everything_once(self):
        tally = Tally()
        for start in (0.0, 0.3, 0.7):
            stream = Stream(tally)
            for number in range(20):
                stream.heard(1 + 13 * number, start + 0.9 * number)
        edges = [-1.0, 3.1, 7.7, 11.0, 99.0]
        parts = [tally.between(*pair) for pair in itertools.pairwise(edges)]
        assert sum(parts) == pytest.approx(3 * (1 + 13 * 19))

    def test_what_came_long_ago_is_forgotten(self):
        tally = Tally(kept=10.0)
        tally.add(0.0, 1.0, 5)
        tally.add(20.0, 21.0, 5)
        assert tally.between(0.0, 1.0) == 0
        assert tally.between(20.0, 21.0) == 5

    @pytest.mark.parametrize("begin", [40.0, 40.7, 41.9, 43.0])
    def test_a_rate_does_not_depend_on_where_in_a_wave_the_window_begins(self, begin):
        tally = Tally()
        for wave in range(20):
            for client in range(25):
                stream = Stream(tally)
                for number in range(33):  # the first token after a prefill of a second
                    stream.heard(1 + number * 8, 4.0 * wave + 1.0 + number * 3.0 / 32)
                assert stream.tokens == 257, client
        spans = tally.within(begin, begin + 10.0)
        assert rate(spans, begin, begin + 10.0, 4.0) == pytest.approx(25 * 257 / 4.0, rel=0.003)

    def test_a_steady_rate_is_the_plain_one(self):
        tally = Tally()
        tally.add(0.0, 100.0, 1_000)
        assert rate(tally.within(20.0, 30.0), 20.0, 30.0, 1.0) == pytest.approx(10.0)


class TestDraws:
    @pytest.mark.parametrize("mean", [1.0, 1.1, 2.2, 2.5, 3.5, 4.0])
    def test_every_stretch_of_rounds_wins_the_mean(self, mean):
        draws = Draws()
        won = [draws.next(mean, 4) for _ in range(1_000)]
        assert set(won) <= {int(mean), int(mean) + 1}
        for count in (10, 100, 1_000):
            assert sum(won[:count]) == pytest.approx(mean * count, abs=1)

    def test_acceptance_one_accepts_no_draft(self):
        draws = Draws()
        assert {draws.next(1.0, 4) for _ in range(100)} == {1}

    def test_no_round_wins_more_than_it_can(self):
        draws = Draws()
        assert {draws.next(3.5, 2) for _ in range(100)} == {2}

    def test_rounds_without_drafts_owe_nothing(self):
        draws = Draws()
        won = []
        for _ in range(500):
            assert draws.next(2.5, 1) == 1
            won.append(draws.next(2.5, 4))
        assert sum(won) == 1_250

    def test_a_changed_mean_holds_from_the_next_round_on(self):
        draws = Draws()
        [draws.next(2.5, 4) for _ in range(3)]
        assert sum(draws.next(1.0, 4) for _ in range(100)) in (100, 101)


class TestServers:
    def test_kernels_that_a_running_server_may_have_mapped_are_not_written_again(self, tmp_path):
        compiled = tmp_path / "bundle" / "kernels" / "rope"
        compiled.mkdir(parents=True)
        (compiled / "rope.so").write_bytes(b"as it was built")
        host = Host(tmp_path / "bundle", tmp_path / "home")
        kernel = host.kernels("tvm-live") / "rope" / "rope.so"
        before = kernel.stat()
        (compiled / "rope.so").write_bytes(b"as it was built anew")
        assert host.kernels("tvm-live") == kernel.parents[1]
        after = kernel.stat()
        assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


class TestCells:
    def test_off_has_the_windows_of_all_cells_with_as_many_clients(self):
        cell = cells.cells(WINDOWS)[-1]
        assert (cell["c"], cell["accept"]) == (70, 2.5)
        assert cell["windows"] == {
            "base": [1000.0],
            "on": [1200.0, 1210.0, 1190.0],
            "off": [900.0, 910.0, 905.0],
            "engineDefault": [],
            "specserve": [1180.0, 1200.0, 1190.0],
        }
        assert cell["off"] == 905.0

    def test_the_ratio_is_to_the_better_arm_and_its_error_from_both_spreads(self):
        cell = cells.cells(WINDOWS)[-1]
        assert cell["ratio"] == pytest.approx(1190 / 1200, abs=1e-4)
        error = 10 / 3**0.5
        relative = ((error / 1190) ** 2 + (error / 1200) ** 2) ** 0.5
        assert cell["stderr"] == pytest.approx(1190 / 1200 * relative, abs=1e-4)

    def test_the_server_without_a_draft_may_be_the_better_one(self):
        cell = cells.cells([*WINDOWS, window(plan.BASE, 3_000.0)])[-1]
        assert cell["ratioToBase"] == pytest.approx(1190 / 2000, abs=1e-4)

    def test_one_window_has_no_error_and_an_absent_arm_no_figure(self):
        cell = cells.cells([window(plan.OFF, 900.0), window(plan.SPECSERVE, 890.0)])[0]
        assert (cell["stderr"], cell["on"], cell["base"]) == (None, None, None)
        assert cell["ratioToBase"] is None
        assert cell["repeats"] == 1

    def test_the_server_without_a_draft_may_be_of_another_start_and_is_then_marked(self):
        own = [each for each in WINDOWS if each["arm"] != plan.BASE]
        other = [window(plan.BASE, rate, fleet="b") for rate in (900.0, 1_100.0)]
        cell = cells.cells([*own, *other])[-1]
        assert (cell["fleet"], cell["base"], cell["baseOfAnotherStart"]) == ("a", 1_000.0, True)
        assert not cells.cells([*WINDOWS, *other])[-1]["baseOfAnotherStart"]
        page = show.render([cells.document([FLEET, *own, *other])])
        assert "| 1000 * " in page

    def test_a_cell_is_of_one_start_of_the_servers(self):
        other = [window(plan.SPECSERVE, 1.0, fleet="b"), window(plan.ON, 5_000.0, fleet="b")]
        cell = cells.cells([*WINDOWS, *other])[-1]
        assert (cell["fleet"], cell["on"]) == ("a", 1200.0)

    def test_a_record_that_broke_off_and_one_that_holds_another_are_read(self, tmp_path):
        first, second = tmp_path / "first", tmp_path / "second"
        first.write_text(json.dumps(WINDOWS[0]) + "\n" + '{"kind": "wi')
        second.write_text(json.dumps(WINDOWS[0]) + "\n" + json.dumps(WINDOWS[1]) + "\n")
        assert cells.read([first, second]) == WINDOWS[:2]

    def test_the_result_says_what_it_is_of_and_what_is_missing(self):
        result = cells.document([FLEET, *WINDOWS])
        assert cells.file_name(result) == "gpu-regret-h200-tp1.json"
        assert {key: result[key] for key in ("gpu", "tp", "link", "sglang", "simulated")} == {
            "gpu": "NVIDIA H200",
            "tp": 1,
            "link": "none",
            "sglang": "0.5.16",
            "simulated": False,
        }
        assert "70 clients at acceptance 1: on, specserve" in result["missing"]
        assert "70 clients at acceptance 3.5: on, off, specserve, base" in result["missing"]
        assert "70 clients at acceptance 2.5: engineDefault" in result["missing"]
        assert result["leftOut"] == []

    def test_the_newest_start_that_has_all_arms_is_gone_by_and_the_other_is_told(self):
        later = [{**each, "fleet": "b", "at": "2026-11-30T10:00:00Z"} for each in WINDOWS]
        part = [window(plan.SPECSERVE, 1.0, fleet="c") | {"at": "2026-11-30T11:00:00Z"}]
        result = cells.document(
            [FLEET, {**FLEET, "id": "b"}, {**FLEET, "id": "c"}, *WINDOWS, *later, *part]
        )
        assert result["cells"][-1]["fleet"] == "b"
        assert [each["fleet"] for each in result["repeated"]] == ["a"]
        page = show.render([result])
        assert "by an earlier start" in page
        rows = [line.split()[1:4] for line in page.splitlines() if line.startswith("|")]
        assert rows.count(["70", "|", "2.5"]) == 2

    def test_servers_of_which_only_the_one_without_a_draft_was_measured_have_no_cell(self):
        result = cells.document([FLEET, window(plan.BASE, 1_000.0)])
        assert (result["cells"], [each["id"] for each in result["fleets"]]) == ([], ["a"])
        assert "No cell was measured" in show.render([result])

    def test_on_several_gpus_fewer_cells_are_wanted_and_no_table_of_the_engine(self):
        result = cells.document([{**FLEET, "tp": 2, "link": "nvlink"}, *WINDOWS])
        assert result["missing"] == [
            f"{clients} clients at acceptance 2.5: on, off, specserve, base"
            for clients in (1, 32, 250)
        ]

    def test_windows_of_a_load_that_starts_out_of_step_are_left_out_until_it_is_in_step(self):
        moments = ("09:10:12", "09:11:23", "09:11:33")
        windows = [
            window(plan.OFF, rate) | {"at": f"2026-11-30T{moment}Z", "settledSeconds": 2.0}
            for moment, rate in zip(moments, (500.0, 890.0, 900.0), strict=True)
        ]
        other = {**FLEET}
        del other["clients"]
        result = cells.document([other, *windows])
        assert result["cells"][0]["off"] == 900.0
        [left_out] = result["leftOut"]
        assert (left_out["windows"], left_out["settleAfterLoadSeconds"]) == (2, 75.0)
        assert left_out["of"][0]["tokensPerSecond"] == [500.0, 890.0]
        assert "left out: 2 windows" in show.render([result])
        assert cells.document([FLEET, *windows])["cells"][0]["off"] == pytest.approx(763.3)


class TestPage:
    def test_it_shows_every_cell_and_both_ratios(self):
        page = show.render([cells.document([FLEET, *WINDOWS])])
        row = next(line for line in page.splitlines() if line.startswith("| 70 | 2.5"))
        assert "0.992" in row
        assert "not measured: 10 clients at acceptance 1: on, off, specserve, base" in page
        assert "exit status 1" not in page  # a log's end is no prose
        assert "engineDefault did not start" in page

    def test_the_goal_is_judged_by_the_worst_cell_with_its_error(self):
        page = show.render([cells.document([FLEET, *WINDOWS])])
        assert "Worst cell of 1 measured with both arms: 0.992" in page

    def test_it_is_drawn(self, tmp_path):
        result = cells.document([FLEET, *WINDOWS])
        assert [path.name for path in show.plot([result], tmp_path / "gpu-regret.png")] == [
            "gpu-regret.png"
        ]
        assert (tmp_path / "gpu-regret.png").stat().st_size > 1_000
