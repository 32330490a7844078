"""What runs have written becomes what people read, and nothing is made up."""

import json
import sys

import pytest

from tests.bench import publish

ENGINE = {
    "sglang": "0.5.23",
    "device": "cpu",
    "tp": 2,
    "contract": {"passed": 102, "failed": 1, "names": ["x"]},
    "flips": {
        "count": 200,
        "requests": 14,
        "requestsLost": 3,
        "directiveToStateMs": {"p50": 24.0, "p99": 224.0, "max": 485.8},
    },
}
MACHINE = {"cores": 2, "processor": "Some CPU", "memoryGiB": 23.5}
LIFE = {
    "installToFirstTokenSeconds": 18.5,
    "flips": 8,
    "requestsSent": 501,
    "requestsLost": 0,
    "takeoverSeconds": 12.7,
    "seconds": 124.2,
    "machine": MACHINE,
    "at": "2026-11-30T02:00:00Z",
}


@pytest.fixture
def build(tmp_path):
    return tmp_path / "build"


@pytest.fixture
def docs(tmp_path):
    return tmp_path / "docs"


def put(build, name, record):
    path = build / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record))


def rows(docs):
    """The cells of each row of the index that names a file."""
    lines = (docs / "README.md").read_text().splitlines()
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines if ".json)" in line
    ]


def test_records_of_engines_and_of_whole_runs_are_copied_as_they_are(build, docs):
    put(build, "engine/engine-0.5.23-cpu-tp2.json", ENGINE)
    put(build, "e2e/summary.json", LIFE)
    written = publish.publish(build, docs)
    assert [path.name for path in written] == ["engine-0.5.23-cpu-tp2.json", "e2e-summary.json"]
    source = build / "engine/engine-0.5.23-cpu-tp2.json"
    assert written[0].read_bytes() == source.read_bytes()


def test_the_index_tells_what_failed_and_what_is_not_known(build, docs):
    put(build, "engine/a.json", ENGINE)
    put(build, "e2e/summary.json", LIFE)
    publish.publish(build, docs)
    engine, life = rows(docs)
    assert engine[:10] == [
        *("0.5.23", "cpu", "2", "102 of 103", "200", "14", "3", "24.0", "224.0", "485.8")
    ]
    assert engine[10:12] == ["not recorded", "not recorded"]
    assert life[:6] == ["[summary](e2e-summary.json)", "simulated", "8", "501", "0", "18.5"]
    assert life[8:] == ["2 cores of Some CPU, 23.5 GiB", "2026-11-30T02:00:00Z"]


def test_the_study_of_an_engine_has_a_row_of_its_own(build, docs):
    study = {"study": "recovery", "sglang": "0.5.23", "device": "cpu", "figures": []}
    put(build, "engine/recovery-0.5.23-cpu.json", study | {"machine": MACHINE, "at": "today"})
    [written] = publish.publish(build, docs)
    assert written.name == "recovery-0.5.23-cpu.json"
    [row] = rows(docs)
    assert row[:5] == ["recovery", "0.5.23", "cpu", "2 cores of Some CPU, 23.5 GiB", "today"]


def test_an_accelerator_is_named_where_it_is_recorded(build, docs):
    put(build, "engine/a.json", ENGINE | {"machine": MACHINE | {"accelerator": "one H200"}})
    publish.publish(build, docs)
    assert rows(docs)[0][10] == "one H200, 2 cores of Some CPU, 23.5 GiB"


def test_what_was_published_before_stays_in_the_index(build, docs):
    put(docs, "engine-0.5.16-h200-tp1.json", ENGINE | {"sglang": "0.5.16", "device": "h200"})
    put(build, "engine/engine-0.5.9-cpu-tp1.json", ENGINE | {"sglang": "0.5.9", "tp": 1})
    put(build, "engine/engine-0.5.16-cpu-tp1.json", ENGINE | {"sglang": "0.5.16", "tp": 1})
    publish.publish(build, docs)
    told = [row[:3] for row in rows(docs)]
    assert told == [["0.5.9", "cpu", "1"], ["0.5.16", "cpu", "1"], ["0.5.16", "h200", "2"]]


def test_the_record_of_a_run_that_broke_off_is_no_result(build, docs, capsys):
    put(build, "e2e/engine.json", {"sglang": None, "flips": 0, "requestsLost": None})
    put(build, "engine/gpu.json", {"levels": []})
    assert publish.publish(build, docs) == []
    assert "engine.json: the run broke off" in capsys.readouterr().err
    assert not (docs / "README.md").exists()


def test_pages_of_others_are_linked_by_their_titles(build, docs):
    docs.mkdir()
    (docs / "regret.md").write_text("# Against the better of two\n")
    put(build, "engine/a.json", ENGINE)
    publish.publish(build, docs)
    assert "- [Against the better of two](regret.md)" in (docs / "README.md").read_text()


def test_a_benchmark_without_a_page_here_is_left_alone(build, docs):
    put(build, "bench/other.json", {"benchmark": "other"})
    assert publish.publish(build, docs) == []


def test_nothing_to_publish_is_a_failure(build, docs, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["publish", "--build", str(build), "--docs", str(docs)])
    assert publish.main() == 1
    assert "run the benchmarks first" in capsys.readouterr().err
    put(build, "engine/a.json", ENGINE)
    assert publish.main() == 0
    assert str(docs / "a.json") in capsys.readouterr().out
