"""What reports of every kind tell: the machine, the emulated network, and what counts as noise."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median

from benchmarks.page.document import Command, Paragraph, Row, Section, Table
from benchmarks.page.language import known, mark, say
from benchmarks.records.results import Cluster, Results
from benchmarks.stats.interval import LEAST_ROUNDS, Measured
from common.system.mkl import CPU_TYPE

__all__ = ["NOISE", "busy", "cluster_in_words", "environment", "noise_in_words", "too_few_rounds"]

WIDE = 0.3  # of a median, that of intervals which say more about the machine
PAIRED_ROUNDS = 7  # from which on rounds are compared one by one, so that drift has no part in it
NOISE = mark(
    "too close to call. With 7 or more rounds of both, one leads if it is ahead by 1 % and in so many rounds (all"
    " of 7 to 10) that chance explains it in at most 2 % of cases. With fewer, one leads if the intervals do not "
    "overlap."
)


def noise_in_words() -> str:
    """For the reports of other kinds."""
    return say("Within noise: {noise}", noise=known(NOISE))


def too_few_rounds(count: int) -> list[str]:
    """Why a verdict names no winner; nothing where there were rounds enough."""
    if count >= LEAST_ROUNDS:
        return []
    return [
        say("One round says nothing about noise, so no winner is named: use --repetitions 5.")
        if count < 2
        else say("Two rounds say too little about noise, so no winner is named: use --repetitions 5.")
    ]


def busy(races: Iterable[Sequence[Measured]], rounds: int) -> list[str]:
    """That rounds of one of these races differed by so much that the machine, more than the schemes, decided it."""
    share = max((median((each.high - each.low) / each.median for each in race) for race in races if race), default=0.0)
    if share <= WIDE:
        return []
    return [
        say(
            "The figures of one contestant vary by {share:.0%} from round to round, as on a busy machine. Repeat "
            "this with --repetitions 7 on an idle one."
            if rounds < PAIRED_ROUNDS
            else "The figures of one contestant vary by {share:.0%} from round to round, as on a busy machine.",
            share=share,
        )
    ]


def environment(results: Results) -> Section:
    """The machine, the versions and the command."""
    rows = [Row(fact) for fact in _facts(results)]
    return Section(
        say("Environment"),
        [
            Table(say("The machine and the versions"), (say("what"), say("value")), [rows]),
            Paragraph(say("All of this comes from one command:")),
            Command(results.command),
        ],
    )


def _facts(results: Results) -> list[tuple[str, str]]:
    facts = results.environment
    return [
        ("CPU", say("{cpu}, {cores} cores", cpu=facts.cpu, cores=facts.cores)),
        *([(CPU_TYPE, str(facts.mkl_cpu_type))] if facts.mkl_cpu_type is not None else []),
        *((name, value) for name, value in (("GPU", facts.gpus), ("NCCL", facts.nccl)) if value),
        (say("Frequency governor"), str(facts.governor or say("unknown"))),
        (say("Memory"), f"{facts.memory_bytes / 1e9:.1f} GB"),
        (
            say("Memory copy"),
            say("{rate:.1f} GB/s, noise {noise:.1%}", rate=facts.memcpy_gb_per_s, noise=facts.noise),
        ),
        (say("Kernel"), str(facts.kernel)),
        ("Python", str(facts.python)),
        *((name, str(version)) for name, version in facts.versions.items()),
        (say("Commit"), str(facts.commit or say("unknown"))),
        (say("Measured"), f"{results.created[:16].replace('T', ' ')} UTC"),
    ]


def cluster_in_words(cluster: Cluster) -> str:
    """Emulated hosts, as in "4 hosts, 1gbit, 0.5ms late, host 2 3x slower"."""
    hosts, link, *more = cluster.words.split(", ")
    told = say("{hosts} hosts, {link}", hosts=hosts.partition(" ")[0], link=link)
    for words in map(str.split, more):
        if words[0] == "host":
            told += say(", host {host} {factor} slower", host=words[1], factor=words[2])
        elif words[-1] == "each":
            told += say(", cores of each: {count}", count=words[0])
        else:
            told += say(", {delay} late", delay=words[0])
    return told
