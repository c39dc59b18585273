"""The report: who wins, what is within noise, and that a failed certificate shows no speed."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from io import StringIO
from typing import Any

import plotly.graph_objects as go
import pytest
from plotly.offline import get_plotlyjs
from rich.console import Console

from benchmarks.reports.compare import certified, groups, print_terminal, to_markdown, verdict, workload
from benchmarks.reports.compare_figures import plots
from benchmarks.reports.compare_page import to_html

Results = dict[str, Any]


def a_run(contestant: str, rate: float, *, low: float | None = None, high: float | None = None) -> dict[str, Any]:
    nranks = int(re.search(r"N=(\d+)", contestant)[1])  # type: ignore[index]
    scheme = re.split(r"[ /]", contestant)[0]
    return {
        "contestant": contestant,
        "scheme": scheme,
        "nranks": nranks,
        "model": "mnist-cnn",
        "dataset": "digits",
        "batch_size": 32,
        "optimizer": "adam",
        "learning_rate": 0.001,
        "seed": 1,
        "steps": 60,
        "warmup_steps": 5,
        "samples_per_s": rate,
        "samples_per_s_interval": [low or rate - 5, high or rate + 5],
        "repetitions": 3,
        "step_ms": {"p50": 33.1, "p99": 40.2},
        "sync_ms": {"p50": 0.7, "p99": 1.9},
        "wait_ms": {"p50": 0.4, "p99": 3.0},
        "phases_ms": {"input": 0.3, "forward": 12.0, "backward": 19.5, "wait": 0.4, "sync": 0.7},
        "loss": {"first": 2.3, "last": 0.4},
        "accuracy": 0.93 if scheme != "local" else None,
        "curve": [[0.0, 2.3], [0.03, 2.1]],
    }


def results_of(*runs: dict[str, Any]) -> Results:
    sizes = sorted({run["nranks"] for run in runs})
    names = {nranks: [run["contestant"] for run in runs if run["nranks"] == nranks] for nranks in sizes}
    check = {"difference": 1.2e-7, "bound": 1e-3, "within": True}
    return {
        "schema": 1,
        "created": "2026-11-21T08:30:00+00:00",
        "command": "python -m benchmarks compare",
        "environment": {
            "cpu": "AMD EPYC",
            "cores": 2,
            "memory_bytes": 25_000_000_000,
            "memcpy_gb_per_s": 8.1,
            "kernel": "6.18",
            "python": "3.11.7",
            "versions": {"numpy": "2.4.6"},
            "commit": None,
            "noise": 0.03,
        },
        "certificate": {
            "identical": True,
            "steps": 5,
            "schemes": {run["contestant"]: digest_of(run["nranks"]) for run in runs},
            "groups": [
                {
                    "nranks": nranks,
                    "identical": True,
                    "contestants": names[nranks],
                    "sha256": digest_of(nranks),
                    "whole_batch": check if nranks > 1 else None,
                }
                for nranks in sizes
            ],
            "differences": [],
        },
        "runs": list(runs),
        "missing": {},
    }


def strong() -> Results:
    """One batch of 64 shared by the ranks, and two other libraries within the bound."""
    results = results_of(a_run("local N=1", 1000), a_run("ps/shm N=2", 1500), a_run("ring/shm N=2", 1600))
    peers = [a_run(name, rate) for name, rate in (("paddle N=2", 1200), ("torch-ddp N=2", 1300))]
    results["runs"] += peers
    for run in results["runs"]:
        run["batch_size"] = 64 // run["nranks"]
    results["certificate"]["schemes"] |= {peer["contestant"]: "e" * 64 for peer in peers}
    near = {"reference": "ps/shm N=2", "difference": 2e-7, "bound": 1e-4, "within": True}
    results["certificate"]["peers"] = [{"contestant": peer["contestant"], **near} for peer in peers]
    return {**results, "scaling": "strong"}


def digest_of(nranks: int) -> str:
    return f"{nranks:x}" * 64


@pytest.fixture
def good() -> Results:
    """A clear winner at N=2, a tie at N=4."""
    return results_of(
        a_run("local N=1", 1000),
        a_run("ps N=2", 1500),
        a_run("ps N=2 S=2", 1600),
        a_run("ring/shm N=2", 1840),
        a_run("ring/tcp N=2", 1700),
        a_run("ps N=4", 1750, low=1700, high=1800),
        a_run("ring/shm N=4", 1820, low=1790, high=1850),
    )


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


def terminal(results: Results, width: int) -> str:
    console = Console(file=StringIO(), width=width)
    print_terminal(results, console)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def all_outputs(results: Results) -> dict[str, str]:
    return {"terminal": terminal(results, 100), "markdown": to_markdown(results), "html": to_html(results)}


class Page(HTMLParser):
    """What a browser would make of a page: its elements, its texts, what it links to."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self.open: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in ("meta", "link", "line"):
            self.open.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "data", "action", "srcset")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        (self.scripts if self.open[-1:] == ["script"] else self.texts).append(data)


class TestVerdict:
    def test_winner_is_measured_against_the_best_of_the_other_scheme(self, good: Results) -> None:
        assert "N=2: ring/shm (1,840 samples/s) is the fastest, 15.0% ahead of ps S=2 (1,600)." in verdict(good)

    def test_parameter_server_can_win(self) -> None:
        lines = verdict(results_of(a_run("ps N=2", 1100), a_run("ring/tcp N=2", 1000)))
        assert lines[1] == "N=2: ps (1,100 samples/s) is the fastest, 10.0% ahead of ring/tcp (1,000)."

    def test_overlapping_spreads_are_within_noise(self, good: Results) -> None:
        line = next(line for line in verdict(good) if line.startswith("N=4"))
        assert line == "N=4: ring/shm (1,820 samples/s) and ps (1,750) are within noise of each other."

    def test_spreads_that_just_miss_are_not(self, good: Results) -> None:
        good["runs"][5]["samples_per_s_interval"] = [1700, 1789]
        assert any(line.startswith("N=4: ring/shm") and "4.0% ahead" in line for line in verdict(good))

    def test_a_tie_within_the_winning_scheme_is_told(self) -> None:
        runs = (a_run("ring/shm N=2", 1840, low=1800), a_run("ring/tcp N=2", 1810), a_run("ps N=2", 1600))
        assert "fastest, within noise of ring/tcp, 15.0% ahead of ps" in verdict(results_of(*runs))[1]

    def test_one_repetition_knows_no_noise(self, good: Results) -> None:
        for run in good["runs"]:
            run["repetitions"] = 1
        assert any("ahead of ps S=2 (1,600); its noise is unknown." in line for line in verdict(good))

    def test_scaling_against_one_process(self, good: Results) -> None:
        scaling = verdict(good)[-2:]
        assert scaling[0].endswith("ring/shm reaches 1.84 times the throughput of one process, 92% of linear scaling.")
        assert scaling[1].endswith(
            "1.82 times the throughput of one process, 46% of linear scaling; 4 ranks share 2 cores."
        )

    def test_no_scaling_without_one_process(self, good: Results) -> None:
        good["runs"] = good["runs"][1:]
        assert not any("linear" in line for line in verdict(good))

    def test_the_bits_come_first(self, good: Results) -> None:
        assert verdict(good)[0].startswith("The bits are the same: after 5 steps")
        assert "(4 at N=2, 2 at N=4)" in verdict(good)[0]

    def test_one_scheme_alone(self) -> None:
        assert "no other scheme" in verdict(results_of(a_run("ps N=2", 900)))[1]

    def test_different_jobs_are_not_compared(self, good: Results) -> None:
        good["runs"][0]["model"] = "mlp"
        with pytest.raises(ValueError, match="mlp on digits, mnist-cnn on digits"):
            to_markdown(good)


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
        text = all_outputs(failed)[output]
        assert "NOT the same" in text
        assert "✗ differs" in text
        for speed in ("samples/s", "1,840", "1840", "33.1", "fastest", "linear", "Plotly"):
            assert speed not in text

    def test_the_same_probe_finds_speed_in_a_good_report(self, good: Results) -> None:
        for text in all_outputs(good).values():
            assert "samples/s" in text
            assert "1,840" in text
            assert "✗" not in text

    def test_other_digests_outweigh_the_word_identical(self, good: Results) -> None:
        good["certificate"]["schemes"]["ps N=4"] = "0" * 64
        assert "NOT the same" in verdict(good)[0]
        assert not groups(good)

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


class TestTerminal:
    @pytest.mark.parametrize("width", [80, 100])
    def test_fits(self, good: Results, width: int) -> None:
        good["missing"] = {"torch-ddp": "PyTorch is not installed"}
        lines = terminal(good, width).splitlines()
        assert max(map(len, lines)) <= width
        assert any(re.match(r" ring/shm \* +2 +1,840 \(1,835–1,845\) +33.1/40.2 .* 93.0", line) for line in lines)
        assert any(re.match(r" ring/tcp N=2 +✓ same bits +222222222222 *$", line) for line in lines)
        assert "torch-ddp is absent: PyTorch is not installed." in lines

    def test_only_the_fastest_of_a_group_is_marked(self, good: Results) -> None:
        marked = re.findall(r"^ (\S.*?) \* +(\d)", terminal(good, 100), re.MULTILINE)
        assert marked == [("ring/shm", "2"), ("ring/shm", "4")]

    def test_markup_in_names_is_text(self) -> None:
        assert "[red]x" in terminal(results_of(a_run("[red]x N=2", 100), a_run("ps N=2", 50)), 100)


class TestMarkdown:
    def test_tables_are_well_formed(self, good: Results) -> None:
        good["runs"].append(a_run("odd|name N=2", 10))
        tables = re.findall(r"(?:^\|.*\n)+", to_markdown(good), re.MULTILINE)
        assert len(tables) == 3
        for table in tables:
            heads, rule, *rows = table.splitlines()
            columns = len(re.split(r"(?<!\\)\|", heads))
            assert re.fullmatch(r"\|( :?--:? \|)+", rule)
            assert rows
            assert {len(re.split(r"(?<!\\)\|", line)) for line in (rule, *rows)} == {columns}

    def test_fastest_is_bold(self, good: Results) -> None:
        assert re.findall(r"^\| \*\*(\S+)\*\* \| \*\*(\d)\*\*", to_markdown(good), re.MULTILINE) == [
            ("ring/shm", "2"),
            ("ring/shm", "4"),
        ]

    def test_tags_are_text(self) -> None:
        assert "<b>" not in to_markdown(results_of(a_run("<b>x N=2", 100), a_run("ps N=2", 50)))


class TestHtml:
    def test_strings_are_escaped(self, good: Results) -> None:
        evil = "<script>alert('&')</script>"
        results = results_of(*good["runs"], a_run(f"{evil} N=2", 10))
        results["command"] = results["environment"]["cpu"] = results["missing"][evil] = f'{evil}"'
        results["runs"][0]["phases_ms"][evil] = 1.0
        page = Page(to_html(results))
        assert page.tags.count("script") == 3
        assert not page.open
        assert sum(evil in text for text in page.texts) >= 5
        assert "<" not in page.scripts[1]
        assert json.loads(page.scripts[1])

    def test_nothing_is_loaded(self, good: Results) -> None:
        html = to_html(good)
        assert html.count(get_plotlyjs()) == 1
        assert Page(html).links == ["data:,"]
        own = html.replace(get_plotlyjs(), "")
        assert "default-src 'none'" in own
        assert not re.search(r"https?:|//\w|@import|url\(", own)

    def test_page_is_labelled(self, good: Results) -> None:
        html = to_html(good).replace(get_plotlyjs(), "")
        assert '<html lang="en">' in html
        assert html.count("<h1>") == 1
        assert html.count("<caption>") == html.count("<table") == 3
        assert len(re.findall(r'role="img" aria-label="[^"]{30,}"', html)) == 3

    def test_diverged_training_is_still_json(self, good: Results) -> None:
        good["runs"][1]["curve"][1][1] = float("nan")
        figures = json.loads(Page(to_html(good)).scripts[1], parse_constant=pytest.fail)
        assert [y for trace in figures["compare-loss"]["data"] for y in trace["y"] if y is None] == [None]

    def test_figures_are_valid(self, good: Results) -> None:
        for plot in plots(groups(good)):
            go.Figure(json.loads(re.sub(r"var\(--\w+\)", "#888888", json.dumps(plot.figure))))

    def test_bars_show_the_measurements(self, good: Results) -> None:
        *bars, linear = plots(groups(good))[0].figure["data"]
        assert [bar["y"][0] for bar in bars] == [run["samples_per_s"] for run in good["runs"]]
        assert (bars[-1]["error_y"]["array"], bars[-1]["error_y"]["arrayminus"]) == ([30], [30])
        assert linear["y"][::4] == [1000, 2000, 4000]

    def test_a_contestant_keeps_its_colour(self, good: Results) -> None:
        good["runs"].append(a_run("torch-ddp N=2", 10))
        bars, _, lines = plots(groups(good))
        colours = [bar["marker"]["color"] for bar in bars.figure["data"][:-1]]
        assert colours == [line["line"]["color"] for line in lines.figure["data"]]
        assert len(set(colours)) == 6


@pytest.mark.parametrize("runs", [(), (a_run("local N=1", 1000),), (a_run("ring/shm N=2", 1840),)], ids=len)
def test_little_to_report(runs: tuple[dict[str, Any], ...]) -> None:
    results = results_of(*runs)
    for text in all_outputs(results).values():
        assert verdict(results)[0].split(",")[0] in text.replace("\n", " ")
        assert ("1,000 (" in text or "1,840 (" in text) == bool(runs)


def test_modes_in_another_order_take_no_part_in_the_race(good: Results) -> None:
    """Faster than all others, they are neither the fastest nor of the same bits."""
    plain = {name: " ".join(text.split()) for name, text in all_outputs(good).items()}
    assert not any("other order" in text for text in plain.values())
    before = verdict(good)
    free = {**a_run("ps N=2 async", 9000), "mode": "async"}
    good["runs"].insert(0, free)
    good["certificate"]["schemes"][free["contestant"]] = "e" * 64
    good["certificate"]["other_order"] = [free["contestant"]]
    apart = "N=2, in another order by design and so not the same computation: ps async 9,000 samples/s."
    assert verdict(good) == [*before, apart]
    assert [line.same for line in certified(good) if line.contestant == free["contestant"]] == ["other order by design"]
    for text in all_outputs(good).values():
        assert "other order by design" in text
        assert not re.search(r"ps async \*|\*\*ps async|class=.best.[^/]*ps async", text)
    assert "Modes in another order by design have losses of their own." in to_html(good)
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
    assert verdict(good)[0].endswith("(4 at N=2, 2 at N=4). paddle.DataParallel comes within the bound of them.")
    assert [line.same for line in certified(good) if line.contestant == "paddle N=4"] == ["≈ within the bound"]
    for text in all_outputs(good).values():
        assert "≈ within the bound" in text
        assert "its sync is the optimizer's update alone" in " ".join(text.replace("&#x27;", "'").split())
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
    first, race, scaling, in_torch = verdict(results)
    assert first.endswith(" paddle.DataParallel and torch DistributedDataParallel come within the bound of them.")
    assert race.startswith("N=2: ring/shm (1,600 samples/s) is the fastest, ")
    assert in_torch == (
        "torch-ddp computes with PyTorch's kernels and so takes no part in the race; samples/s: 1,700 at N=2."
    )
    told = "N=2: ring/shm makes a step of the same batch 1.60 times as fast as one process, 80% of linear speed-up."
    assert scaling == told
    assert workload(results).startswith(
        "mnist-cnn on digits, batch 64 shared by all ranks (strong scaling), adam 0.001"
    )
    assert workload(good).startswith("mnist-cnn on digits, batch 32 a rank, adam")
    for text in all_outputs(results).values():
        plain = " ".join(text.replace("&#x27;", "'").split())
        assert "paddle and torch-ddp exchange gradients inside backward; their sync is" in plain
        assert "mpi-ddp is absent: PyTorch is not installed (pip install torch)." in plain
        assert "– absent" in plain
