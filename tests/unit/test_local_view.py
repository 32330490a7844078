"""What is told: lines of news, the rows of the screen, and the screen itself."""

import io
import json
import logging
from dataclasses import replace

import pytest
from rich.console import Console

from specserve import api
from specserve.decisions import Decision, Switch
from specserve.fleet import Steered
from specserve.local import news
from specserve.local.news import Board, News
from specserve.local.places import Facts, Place
from specserve.local.rows import HEADER, row
from specserve.local.view import View, picture
from specserve.policy import Memory, Sample, Setting, Verdict
from specserve.status import Engine

PLACE = Place("chat-0", "http://127.0.0.1:30000", "http://127.0.0.1:9470")
KEY = ("team", "chat")
POLICY = api.Policy()
NOW = 1000.0
FACTS = Facts(NOW, "uid", "boot", "on", (3,), 5000, 1234.5)
VERDICT = Verdict(
    "Off",
    "AboveThreshold",
    "off: 96 in flight above 48",
    flip=True,
    setting=Setting(((1, 0),)),
    numbers=(("running", 96.0),),
)


def steered(**fields):
    memory = replace(Memory.start(), heard=NOW)
    known = {
        "memory": memory,
        "sample": Sample(NOW, NOW, 12, 3),
        "readback": {"mode": "on", "controllable": True},
        "lease_until": NOW + 41.6,
        "verdict": VERDICT,
        "accept": 2.61,
    }
    return Steered(PLACE.pod(KEY), due=0.0, **known | fields)


def shown(one, facts=FACTS, now=NOW):
    return row(PLACE, one, facts, POLICY, now)


# -- rows --------------------------------------------------------------------------------------


def test_a_row_says_what_the_engine_reports():
    found = shown(steered())
    assert found.cells == ("chat-0", "on", "3", "12", "3", "2.61", "1,234", "42")
    assert found.reason == "off: 96 in flight above 48"
    assert found.on is True
    assert not found.trouble


def test_what_is_not_known_is_not_zero():
    assert shown(steered(), facts=None).cells == ("chat-0", *"-------")
    bare = steered(sample=None, accept=None, lease_until=0.0)
    assert shown(bare, replace(FACTS, rate=None, active=())).cells == ("chat-0", "on", *"------")
    assert shown(None, facts=None).reason == "not started yet"
    stale = shown(steered(), now=NOW + 60)
    assert stale.running == stale.queued == "-"


def test_an_engine_that_is_off_takes_no_steps_before_its_first_round_either():
    assert shown(steered(), replace(FACTS, mode="off", active=())).steps == "0"
    assert shown(steered(), replace(FACTS, mode="tiers", active=())).steps == "-"


@pytest.mark.parametrize(
    "trouble",
    [
        {"control_error": ("EngineTimeout", "no answer in time")},
        {"sample_error": ("EngineTimeout", "no answer in time")},
        {"readback": {"mode": "on", "controllable": False, "reason": "no adaptive controller"}},
    ],
)
def test_what_is_wrong_takes_the_place_of_the_reason(trouble):
    found = shown(steered(**trouble))
    assert found.trouble
    assert found.reason in {
        "EngineTimeout: no answer in time",
        "NotControllable: no adaptive controller",
    }


@pytest.mark.parametrize(("mode", "word"), [("tiers", "table"), ("auto", "own policy")])
def test_modes_in_words(mode, word):
    assert shown(steered(), replace(FACTS, mode=mode)).mode == word


# -- the screen --------------------------------------------------------------------------------


def drawn(width=100):
    return Console(file=io.StringIO(), width=width, highlight=False, color_system=None)


def test_the_screen_has_a_line_and_a_reason_for_each_engine():
    console = drawn()
    away = shown(steered(control_error=("EngineTimeout", "no answer in time")))
    console.print(picture("chat: BreakEven", [shown(steered()), replace(away, name="chat-1")]))
    text = console.file.getvalue()
    assert "chat: BreakEven" in text
    assert all(name in text for name in HEADER)
    assert "chat-0  off: 96 in flight above 48" in text
    assert "chat-1  EngineTimeout: no answer in time" in text
    assert "1,234" in text


def test_square_brackets_of_a_reason_are_no_markup():
    console = drawn()
    told = shown(steered(verdict=replace(VERDICT, reason="on: [bold]not bold[/bold] [/x]")))
    console.print(picture("a [title]", [told]))
    assert "on: [bold]not bold[/bold] [/x]" in console.file.getvalue()
    assert "a [title]" in console.file.getvalue()


def test_news_go_by_above_the_table():
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    with View(lambda: "chat", lambda: [shown(steered())], console) as view:
        view.tell(News(0.0, "decides", "chat-0", "off: [96] in flight"))
    assert "chat-0 decides off: [96] in flight" in console.file.getvalue()


# -- news --------------------------------------------------------------------------------------


@pytest.fixture
def told():
    return []


@pytest.fixture
def board(told):
    return Board(lambda: 86400.0, told.append, None)


def engine(**fields):
    base = Engine(
        name="chat-0",
        on=True,
        wanted="On",
        code="",
        difference=None,
        controllable=True,
        control_reason="",
        control_error=None,
        sample_error=None,
        sampled=True,
        ranks=1,
    )
    return replace(base, **fields)


def test_a_decision_is_a_line_and_an_entry_of_the_operators_form(told):
    log = io.StringIO()
    board = Board(lambda: 0.0, told.append, log)
    board.decided(Decision(1.5, "chat-0", VERDICT, "mode"))
    assert told[0].line() == "1970-01-01T00:00:01Z chat-0 decides: off: 96 in flight above 48"
    entry = json.loads(log.getvalue())
    assert entry["time"] == "1970-01-01T00:00:01.500Z"
    assert entry["numbers"] == {"running": 96.0}
    assert (entry["mode"], entry["code"], entry["what"]) == ("Off", "AboveThreshold", "mode")


def test_steering_goes_on_where_the_decision_log_cannot_be_written(told):
    class Full(io.StringIO):
        def write(self, _):
            raise OSError(28, "No space left on device")

    board = Board(lambda: 0.0, told.append, Full())
    for _ in range(2):
        board.decided(Decision(1.5, "chat-0", VERDICT, "mode"))
    assert [line.kind for line in told] == ["warning", "decides", "decides"]
    assert "the decision log ends here: No space left on device" in told[0].text


def test_a_switch_is_told_once(board, told):
    first, second = (Switch(at, "chat-0", "Off", "why") for at in (1.0, 2.0))
    board.switched((first,))
    board.switched((first,))
    board.switched((first, second))
    assert [line.at for line in told] == [1.0, 2.0]


def test_a_trouble_is_told_when_it_begins_when_it_changes_and_when_it_ends(board, told):
    for control in (None, ("A", "a"), ("A", "other words"), ("B", "b"), None, None):
        board.seen(engine(control_error=control))
    assert [(line.kind, line.text[:2]) for line in told] == [
        ("warning", "A:"),
        ("warning", "B:"),
        ("well", "it"),
    ]
    board.seen(engine(sample_error=("SamplesStale", "")))
    assert told[-1].text.startswith("SamplesStale: no new reading")
    board.seen(engine(controllable=False, control_reason="NGRAM"))
    assert told[-1].text == "it cannot be switched live: NGRAM"


def test_warnings_of_the_log_are_news(board, told):
    log = logging.getLogger("specserve.test")
    with news.logged(board):
        log.info("not this")
        log.warning("chat-0: %s", "the engine ended while it speculated")
        log.error("a tick failed", exc_info=ValueError("broken"))
    log.warning("not this either")
    assert [line.text for line in told] == [
        "chat-0: the engine ended while it speculated",
        "a tick failed: ValueError: broken",
    ]
