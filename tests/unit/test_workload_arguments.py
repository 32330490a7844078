"""What an engine's limits come to: shares of its copies, graph sizes, refusals with numbers."""

import pytest

from specserve.workload import UnusableArgument, UnusableSpec, layout_of, requests_asked
from specserve.workload.flags import FLAGS, NAMES, VERSIONS, meant
from tests.unit.test_workload import args, parsed

GPUS = {"resources": {"limits": {"nvidia.com/gpu": 8}}}


def number(flag, words):
    """The value of a flag in a rendered command line, None if it is not there."""
    found = [word.partition("=")[2] for word in words if word.startswith(f"{flag}=")]
    return int(found[0]) if found else None


def limits(*words, **engine):
    rendered = args(*words, engine={**GPUS, **engine})
    return (
        number("--max-running-requests", rendered),
        number("--cuda-graph-max-bs-decode", rendered),
    )


# The table.


def test_no_spelling_means_two_flags():
    spellings = [text for flag in FLAGS for text in flag.all_spellings]
    assert len(spellings) == len(set(spellings))


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
def test_each_spelling_means_its_flag_and_so_does_it_with_underscores(flag):
    for text in flag.all_spellings:
        assert meant(text) == (flag.name,)
        assert meant("--" + text[2:].replace("-", "_")) == (flag.name,)


def test_a_beginning_means_all_that_begin_so():
    assert meant("--mem") == ("--mem-fraction-static",)
    assert meant("--cuda-graph-b") == ("--cuda-graph-backend-decode", "--cuda-graph-bs-decode")
    assert meant("--lora-paths") == ()
    assert meant("-h") == ()
    assert set(meant("--")) == NAMES


def test_a_renamed_flag_is_written_in_the_name_that_all_versions_share():
    assert args("--cuda-graph-max-bs", "512")[-2:] == ["--cuda-graph-max-bs-decode", "512"]
    graphs = next(flag for flag in FLAGS if flag.name == "--cuda-graph-max-bs-decode")
    assert "--cuda-graph-max-bs" in graphs.spellings("0.5.18")
    assert "--cuda-graph-max-bs" not in graphs.spellings("0.5.23")
    assert all(graphs.name in graphs.spellings(version) for version in VERSIONS)


def test_what_is_rendered_is_known_to_every_version():
    rendered = args(engine={"memFractionStatic": "0.8"}, model={"contextLength": 4096})
    known = {flag.name: flag for flag in FLAGS}
    for word in rendered:
        if word.startswith("--"):
            flag = known[word.partition("=")[0]]
            assert all(flag.name in flag.spellings(version) for version in VERSIONS)


@pytest.mark.parametrize("word", ["--cuda-graph-b=8", "--speculative-draft=x", "--s"])
def test_an_ambiguous_beginning_is_refused(word):
    with pytest.raises(UnusableArgument, match="write it in full"):
        args(word)


# Shares and sizes.


@pytest.mark.parametrize(
    ("words", "engine", "expected"),
    [
        ((), {}, (256, 256)),
        ((), {"maxRunningRequests": 48}, (48, 48)),
        # Every copy of the model gets the whole of --max-running-requests from SGLang.
        ((), {"dataParallel": 2}, (128, 128)),
        ((), {"dataParallel": 3}, (85, 85)),
        (("--dp=4",), {}, (64, 64)),
        # Attention groups share what their copy gets.
        (("--enable-dp-attention",), {"tensorParallel": 4, "dataParallel": 2}, (256, 128)),
        (("--attn-dp-size=4",), {"tensorParallel": 4}, (256, 64)),
        # A user's limit is handed on as SGLang understands it.
        (("--max-running-requests=96",), {"dataParallel": 2}, (96, 96)),
        # Sizes that reach the limit are the user's own affair, as is having no graphs.
        (("--cuda-graph-max-bs=512",), {}, (256, 512)),
        (("--cuda-graph-bs-decode", "1", "256"), {}, (256, None)),
        (('--cuda-graph-config={"decode":{"max_bs":300}}',), {}, (256, None)),
        (('--cuda-graph-config={"decode":{"bs":[1,256]}}',), {}, (256, None)),
        (('--cuda-graph-config={"prefill":{"max_bs":300}}',), {}, (256, 256)),
        (("--disable-cuda-graph",), {}, (256, None)),
        (("--cuda-graph-backend-decode=disabled",), {}, (256, None)),
        (('--cuda-graph-config={"decode":{"backend":"disabled"}}',), {}, (256, None)),
        (("--cuda-graph-backend-decode=full",), {}, (256, 256)),
    ],
)
def test_graphs_are_captured_up_to_the_largest_batch_of_a_rank(words, engine, expected):
    assert limits(*words, **engine) == expected


@pytest.mark.parametrize("method", ["None", "NGRAM", "STANDALONE"])
def test_graphs_reach_the_limit_without_live_control_too(method):
    words = args(draft={"method": method, "source": "hf://a/b"})
    assert number("--cuda-graph-max-bs-decode", words) == 256


@pytest.mark.parametrize(
    ("words", "engine", "gpus", "ranks"),
    [
        ((), {}, 1, 1),
        ((), {"tensorParallel": 2, "dataParallel": 2}, 4, 2),
        (("--pp-size=2",), {"tensorParallel": 2}, 4, 1),
        (("--enable-dp-attention",), {"tensorParallel": 4, "dataParallel": 4}, 4, 4),
        (("--attention-data-parallel-size=2",), {"tensorParallel": 4}, 4, 2),
    ],
)
def test_gpus_and_ranks_follow_the_arguments_in_force(words, engine, gpus, ranks):
    shape = layout_of(parsed(engine={"args": list(words), **engine}))
    assert (shape.gpus, shape.ranks) == (gpus, ranks)


@pytest.mark.parametrize(
    ("words", "engine", "asked"),
    [
        ((), {}, 256),
        ((), {"dataParallel": 3}, 255),
        (("--max-running-requests=96",), {"dataParallel": 2}, 192),
        (("--attn-dp-size=4",), {"tensorParallel": 4}, 256),
    ],
)
def test_what_a_pod_is_asked_for_is_what_its_copies_are_told(words, engine, asked):
    assert requests_asked(parsed(engine={"args": list(words), **engine})) == asked


def test_the_memory_fraction_is_rendered_where_it_is_given():
    assert not [word for word in args() if "mem-fraction" in word]
    assert "--mem-fraction-static=0.85" in args(engine={"memFractionStatic": "0.85"})
    rendered = args("--mem-frac=0.7", engine={"memFractionStatic": "0.85"})
    assert [word for word in rendered if "mem-frac" in word] == ["--mem-fraction-static=0.7"]


# Refusals.


@pytest.mark.parametrize(
    ("words", "changes", "message"),
    [
        (("--dp=300",), {}, "256 requests cannot be shared by 300 copies"),
        (
            ("--attn-dp-size=8",),
            {"engine": {"tensorParallel": 8, "maxRunningRequests": 4}},
            "4 requests cannot be shared by 8 attention groups",
        ),
        (
            ("--attn-dp-size=8",),
            {"engine": {"tensorParallel": 8, "maxRunningRequests": 1}},
            "1 request cannot be shared",
        ),
        (
            ("--attn-dp-size=3",),
            {"engine": {"tensorParallel": 4}},
            "3 groups cannot divide the 4 GPUs",
        ),
        (
            ("--max-total-tokens=400",),
            {},
            "--max-total-tokens 400 is not enough for 256 requests at once: .* 200 here",
        ),
        (
            ("--max-total-tokens", "4Ki"),
            {"model": {"contextLength": 8192}},
            "full context length 8192 does not fit --max-total-tokens 4096",
        ),
        (("--cuda-graph-max-bs", "64"), {}, "ends at 64, and up to 256 requests run at once"),
        (("--cuda-graph-bs", "1", "8"), {}, "ends at 8, and up to 256"),
        (
            ('--cuda-graph-config={"decode":{"max_bs":64}}',),
            {},
            r"--cuda-graph-config decode\.max_bs ends at 64",
        ),
        (("--max-running-requests=many",), {}, "needs a whole number above 0"),
    ],
)
def test_limits_that_exclude_each_other_are_refused_with_the_numbers(words, changes, message):
    engine = {**GPUS, **changes.get("engine", {})}
    with pytest.raises(UnusableSpec, match=message) as caught:
        args(*words, **{**changes, "engine": engine})
    assert caught.value.field.startswith("spec.engine")


def test_batches_without_graphs_are_allowed_where_nothing_is_switched():
    draft = {"method": "None"}
    assert number("--cuda-graph-max-bs-decode", args("--cuda-graph-max-bs=8", draft=draft)) == 8


def test_tokens_that_suffice_are_fine():
    assert limits("--max-total-tokens=25.6k") == (256, 256)


def test_copies_need_a_device_each():
    with pytest.raises(UnusableSpec, match=r"spread over 4 GPUs.*nvidia\.com/gpu: 2"):
        args(
            engine={
                "tensorParallel": 2,
                "dataParallel": 2,
                "resources": {"limits": {"nvidia.com/gpu": 2}},
            }
        )
