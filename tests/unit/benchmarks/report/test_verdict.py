"""The report: who wins, what is within noise, and that a failed certificate shows no speed."""

from __future__ import annotations

import re
from html import unescape
from typing import Any

import pytest

from benchmarks.reports.compare import certificate
from benchmarks.reports.compare.certificate import Certified
from benchmarks.reports.compare.report import workload
from tests.support.compare_samples import Results, a_run, results_of, strong
from tests.support.reporting import terminal, to_html, to_markdown, verdict
from tests.support.typed_results import typed


@pytest.fixture
def failed(good: Results) -> Results:
    """Another digest for one contestant; runs that must not be there are."""
    good["certificate"]["identical"] = False
    good["certificate"]["schemes"]["ring/tcp N=2"] = "f" * 64
    found = {"contestant": "ring/tcp N=2", "reference": "ps N=2", "bucket": 1}
    good["certificate"]["differences"] = [
        {**found, "parameter": "conv1.weight", "max_abs": 3.1e-5},
        {**found, "parameter": "conv1.bias", "max_abs": 2e-5},
    ]
    return good


def certified(results: Results) -> list[Certified]:
    return certificate.certified(typed(results))


def all_outputs(results: Results) -> dict[str, str]:
    return {"terminal": terminal(results, 100), "markdown": to_markdown(results), "html": to_html(results)}


class TestVerdict:
    def test_winner_is_measured_against_the_best_of_the_other_scheme(self, good: Results) -> None:
        assert "N=2: ring/shm (1,840 samples/s) is the fastest, 15.0% ahead of ps S=2 (1,600)." in verdict(good)

    def test_parameter_server_can_win(self) -> None:
        lines = verdict(results_of(a_run("ps N=2", 1100), a_run("ring/tcp N=2", 1000)))
        assert lines[1] == "N=2: ps (1,100 samples/s) is the fastest, 10.0% ahead of ring/tcp (1,000)."

    def test_overlapping_spreads_are_within_noise(self, good: Results) -> None:
        line = next(line for line in verdict(good) if line.startswith("N=4"))
        assert line == "N=4: ring/shm (1,820 samples/s) and ps (1,750) are within noise of each other: take either."

    def test_spreads_that_just_miss_are_not(self, good: Results) -> None:
        good["runs"][5]["samples_per_s_interval"] = [1700, 1789]
        assert any(line.startswith("N=4: ring/shm") and "4.0% ahead" in line for line in verdict(good))

    def test_a_tie_within_the_winning_scheme_is_told(self) -> None:
        runs = (a_run("ring/shm N=2", 1840, low=1800), a_run("ring/tcp N=2", 1810), a_run("ps N=2", 1600))
        assert "fastest, within noise of ring/tcp, 15.0% ahead of ps" in verdict(results_of(*runs))[1]

    def test_one_repetition_knows_no_noise(self, good: Results) -> None:
        for run in good["runs"]:
            run["repetitions"] = 1
        told = verdict(good)
        assert "N=2: ring/shm has the highest median, 1,840 samples/s; ps S=2 has 1,600." in told
        assert "One round says nothing about noise, so no winner is named: use --repetitions 5." in told
        for text in all_outputs(good).values():
            assert "fastest" not in text
            assert "ahead of" not in text
        assert verdict(good)[-2].endswith("of one process, 92% of linear scaling; its noise is unknown.")
        assert workload(typed(good)).endswith(" not timed), 1 repetition")

    def test_scaling_against_one_process(self, good: Results) -> None:
        scaling = verdict(good)[-2:]
        assert scaling[0].endswith(
            "ring/shm reaches 1.84 times the throughput of one process (1.83–1.85), 92% of linear scaling."
        )
        assert scaling[1].endswith(
            "1.82 times the throughput of one process (1.78–1.86), 46% of linear scaling; 4 ranks share 2 cores."
        )

    def test_scaling_within_noise_says_so(self, good: Results) -> None:
        alone = next(run for run in good["runs"] if run["nranks"] == 1)
        alone["samples_per_s_interval"] = [500, 3000]
        assert verdict(good)[-2].endswith("(0.61–3.69), 92% of linear scaling; within noise of one process.")

    def test_no_scaling_without_one_process(self, good: Results) -> None:
        good["runs"] = good["runs"][1:]
        assert not any("linear" in line for line in verdict(good))

    def test_the_bits_come_first(self, good: Results) -> None:
        assert verdict(good)[0].startswith("Same bits: after 5 steps")
        assert "the same bits after 5 steps (4 at N=2, 2 at N=4)" in to_markdown(good)

    def test_one_scheme_alone(self) -> None:
        assert "no other scheme" in verdict(results_of(a_run("ps N=2", 900)))[1]

    def test_different_jobs_are_not_compared(self, good: Results) -> None:
        good["runs"][0]["model"] = "mlp"
        with pytest.raises(ValueError, match="mlp on digits, mnist-cnn on digits"):
            to_markdown(good)


def marks(results: Results) -> int:
    """How many rows the outputs mark, the same in all of them."""
    page = len(re.findall("class=.best.", to_html(results)))
    assert ("fastest of its N" in to_html(results)) == bool(page)
    screen = terminal(results, 120)
    assert len(re.findall(r"^ *\S.* \* +\d", screen, re.MULTILINE)) == page
    assert ("* the fastest of its N" in screen) == bool(page)
    return page


@pytest.mark.parametrize(
    ("rival", "words", "count"),
    [
        (a_run("ps N=2", 900), "is the fastest, 11.1% ahead of ps", 1),
        (a_run("ps N=2", 998), "within noise of each other: take either", 0),
        (a_run("ring/tcp N=2", 998), "is the fastest; no other scheme was measured", 1),
        ({**a_run("ps N=2", 900), "repetitions": 2}, "has the highest median", 0),
    ],
)
def test_only_whom_the_verdict_calls_the_fastest_is_marked(rival: Results, words: str, count: int) -> None:
    results = results_of(a_run("ring/shm N=2", 1000), rival)
    assert any(words in sentence for sentence in verdict(results))
    assert marks(results) == count


class TestFailedCertificate:
    def test_names_the_first_difference(self, failed: Results) -> None:
        outcome, first = verdict(failed)
        assert "NOT the same" in outcome
        assert "ring/tcp N=2" in outcome
        assert first == (
            "First difference: ring/tcp N=2 against ps N=2, bucket 1, parameter conv1.weight, by up to 3.1e-05."
        )

    @pytest.mark.parametrize("output", ["terminal", "markdown", "html"])
    def test_shows_no_speed(self, failed: Results, output: str) -> None:
        text = re.sub("<style>.*?</style>", "", all_outputs(failed)[output], flags=re.DOTALL)
        assert "NOT the same" in text
        assert "✗ differs" in text
        for speed in ("samples/s", "1,840", "1840", "33.1", "fastest", "linear", "<svg", "plot"):
            assert speed not in text

    def test_the_same_probe_finds_speed_in_a_good_report(self, good: Results) -> None:
        for text in all_outputs(good).values():
            assert "samples/s" in text
            assert "1,840" in text
            assert "✗" not in text

    def test_other_digests_outweigh_the_word_identical(self, good: Results) -> None:
        good["certificate"]["schemes"]["ps N=4"] = "0" * 64
        assert "NOT the same" in verdict(good)[0]
        assert not certificate.groups(typed(good))

    def test_too_far_from_the_whole_batch(self, good: Results) -> None:
        good["certificate"]["passed"] = False
        good["certificate"]["groups"][1]["whole_batch"]["within"] = False
        assert "too far from" in verdict(good)[0]
        assert "BEYOND the bound of 1e-03" in to_markdown(good)
        assert "samples/s" not in to_markdown(good)

    def test_a_difference_may_have_no_place(self, failed: Results) -> None:
        failed["certificate"]["differences"][0].update(bucket=None, parameter=None, max_abs=None)
        assert verdict(failed)[1] == "First difference: ring/tcp N=2 against ps N=2."

    def test_one_contestant_may_differ_from_itself(self) -> None:
        results = results_of(a_run("ps N=2", 900))
        rank = {
            "contestant": "ps N=2",
            "reference": "its own rank 0",
            "bucket": None,
            "parameter": None,
            "max_abs": None,
        }
        results["certificate"].update(identical=False, differences=[rank])
        assert "the parameters of ps N=2 differ" in verdict(results)[0]
        assert "ps N=2 | ✗ differs" in to_markdown(results)


@pytest.mark.parametrize("runs", [(), (a_run("local N=1", 1000),), (a_run("ring/shm N=2", 1840),)], ids=len)
def test_little_to_report(runs: tuple[dict[str, Any], ...]) -> None:
    results = results_of(*runs)
    for text in all_outputs(results).values():
        assert verdict(results)[0].split(",")[0] in text.replace("\n", " ")
        assert ("1,000 (" in text or "1,840 (" in text) == bool(runs)


def test_modes_in_another_order_take_no_part_in_the_race(good: Results) -> None:
    """Faster than all others, they are neither the fastest nor of the same bits."""
    plain = {name: " ".join(text.split()) for name, text in all_outputs(good).items()}
    assert not any("another order" in text for text in plain.values())
    before = verdict(good)
    free = {**a_run("ps N=2 async", 9000), "mode": "async"}
    good["runs"].insert(0, free)
    good["certificate"]["schemes"][free["contestant"]] = "e" * 64
    good["certificate"]["other_order"] = [free["contestant"]]
    apart = "N=2, not ranked, because these modes update in another order by design: ps async 9,000 samples/s."
    assert verdict(good) == [*before, apart]
    assert [line.same for line in certified(good) if line.contestant == free["contestant"]] == [
        "another order by design"
    ]
    for text in all_outputs(good).values():
        assert "another order by design" in text
        assert not re.search(r"ps async \*|\*\*ps async|class=.best.[^/]*ps async", text)
    assert "Modes that update in another order have losses of their own." in to_html(good)
    winner = max(run["samples_per_s"] for run in good["runs"] if run["nranks"] == 2 and run is not free)
    good["runs"].append({**a_run("ps N=2 geo:2", winner), "mode": "geo:2"})  # nor is it within noise of them
    assert verdict(good)[: len(before)] == before
    free["mode"] = "ssp:0"
    assert "ps async (9,000 samples/s) is the fastest" in verdict(good)[1]


def test_paddle_may_differ_a_little_and_too_much_fails(good: Results) -> None:
    good["runs"].append(a_run("paddle N=4", 900))
    good["certificate"]["schemes"]["paddle N=4"] = "e" * 64
    peer = {"contestant": "paddle N=4", "reference": "ps N=4", "difference": 2e-7, "bound": 1e-4, "within": True}
    good["certificate"]["peers"] = [peer]
    assert verdict(good)[1] == "paddle.DataParallel stays within the allowed difference from them."
    assert [line.same for line in certified(good) if line.contestant == "paddle N=4"] == ["≈ within the bound"]
    for text in all_outputs(good).values():
        assert "≈ within the bound" in text
        assert "its sync is the optimizer's update alone" in " ".join(unescape(text).split())
    assert (
        certified({**good, "certificate": {**good["certificate"], "peers": [{**peer, "difference": 0}]}})[-1].same
        is True
    )
    peer["within"] = good["certificate"]["passed"] = False
    for text in all_outputs(good).values():
        assert "the parameters of paddle N=4 differ" in " ".join(text.split())
        assert "samples/s" not in text


def test_strong_scaling_is_one_batch_for_all_and_speed_up(good: Results) -> None:
    results = strong()
    results["runs"][-1].update(samples_per_s=1700, samples_per_s_interval=[1695, 1705])  # kernels of its own
    results["missing"] = {"mpi-ddp": "PyTorch is not installed (pip install torch)"}
    _, near, race, scaling, in_torch = verdict(results)
    assert near == "paddle.DataParallel and torch DistributedDataParallel stay within the allowed difference from them."
    assert race.startswith("N=2: ring/shm (1,600 samples/s) is the fastest, ")
    assert in_torch == ("torch-ddp is not ranked, because it computes with PyTorch's kernels. Samples/s: 1,700 at N=2.")
    told = "N=2: ring/shm steps through the same batch 1.60 times as fast as one process (1.59–1.61), 80% of linear "
    told += "speed-up."
    assert scaling == told
    assert workload(typed(results)).startswith(
        "mnist-cnn on digits, batch 64 shared by all ranks (strong scaling), adam 0.001"
    )
    assert workload(typed(good)).startswith("mnist-cnn on digits, batch 32 per rank, adam")
    for text in all_outputs(results).values():
        plain = " ".join(unescape(text).split())
        assert "paddle and torch-ddp exchange gradients inside backward, so their sync is" in plain
        assert "mpi-ddp is absent: PyTorch is not installed (pip install torch)." in plain
        assert "– absent" in plain
