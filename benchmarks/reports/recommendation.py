"""Which scheme to use for a job on this machine: by how much, how sure, and what bounds it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.contestants.table_of_trainings import RIVALS
from benchmarks.page.charts import Bar, BarGroup, Bars
from benchmarks.page.document import Key, Plot
from benchmarks.page.language import known, mark, say
from benchmarks.records.compare import CompareResults, Run
from benchmarks.records.results import Environment
from benchmarks.records.script import ScriptResults, ScriptRun
from benchmarks.records.suite import PartResults
from benchmarks.records.sweep import SweepResults
from benchmarks.reports.compare.certificate import groups
from benchmarks.reports.runs import KNOWN, in_step, series
from benchmarks.reports.sweep import nearest_to_limit
from benchmarks.stats.interval import LEAST_ROUNDS, Measured, are_paired, chance

__all__ = ["grounds", "picture", "races_in", "recommend"]

NAMES = {"ps": mark("the parameter server (ps)"), "ring": mark("the all-reduce (collective)")}
COLOURS = {"ps": KNOWN["ps/shm"], "ring": KNOWN["ring/shm"]}
COMPUTING = ("input", "forward", "backward")


@dataclass(frozen=True)
class Speed:
    """Steps or samples in a second."""

    contestant: str
    measured: Measured

    @property
    def rate(self) -> float:
        return self.measured.median

    def ties(self, other: Speed) -> bool:
        return not self.measured.against(other.measured)


@dataclass(frozen=True)
class Race:
    """The best contestant of each scheme, on one job and number of ranks.

    Args:
        where: the job and the number of ranks.
        best: by scheme.
        computing: the share of the fastest one's step in which it computes, where it is known.
        repetitions: of each contestant.
        paired: whether they can be compared repetition by repetition.
    """

    where: str
    best: Mapping[str, Speed]
    computing: float | None
    repetitions: int
    paired: bool

    def lead(self, one: str, other: str) -> float:
        return self.best[one].rate / self.best[other].rate


def recommend(parts: Sequence[tuple[str, PartResults]], environment: Environment) -> list[str]:
    """The sentence that says which scheme; none if no part held a race between schemes.

    Args:
        parts: the title and the results of each part that ended well.
    """
    both = between_schemes(parts)
    machine = say("{cpu}, {cores} cores", cpu=environment.cpu, cores=environment.cores)
    return [say("On this machine ({machine}): {choice}", machine=machine, choice=choice(both))] if both else []


def grounds(parts: Sequence[tuple[str, PartResults]], environment: Environment) -> list[str]:
    """What stands behind a recommendation: how sure it is, how far Paddle's own is, and what bounds any scheme."""
    races = races_of(parts)
    fewest, most = (pick(race.repetitions for race in races) for pick in (min, max))
    sure = say(
        "Confidence: all parts shown passed their certificate, so they compute the same. Each contestant was "
        "measured {rounds} times in turn. Only differences beyond noise count ({chance}). Memory speed varied by "
        "{noise:.1%}.",
        rounds=say("{few} to {most}" if fewest < most else "{most}", few=fewest, most=most),
        chance=say("with one repetition noise is unknown")
        if fewest < 2
        else say(
            "two equals look apart in 1 of {cases} cases",
            cases=min(int(1 / chance(race.repetitions, paired=race.paired)) for race in races),
        ),
        noise=environment.noise,
    )
    return [sure, *against_paddle(races), *bounds(races, parts)]


def races_of(parts: Sequence[tuple[str, PartResults]]) -> list[Race]:
    return [race for title, results in parts for race in races_in(title, results)]


def between_schemes(parts: Sequence[tuple[str, PartResults]]) -> list[Race]:
    """The races that both schemes took part in."""
    return [race for race in races_of(parts) if NAMES.keys() <= race.best.keys()]


def picture(parts: Sequence[tuple[str, PartResults]]) -> list[Plot]:
    """The speeds of the best of each scheme in every race, against the fastest; none if there was no race."""
    both = between_schemes(parts)
    if not both:
        return []
    heard = say("; ").join(
        f"{race.where}: " + say(", ").join(f"{bar.name} {bar.text}" for bar in _bars(race)) for race in both
    )
    return [
        Plot(
            "suite-races",
            say("The two schemes side by side"),
            say(
                "The best contestant of each scheme, as a share of the faster one's speed. Lines are intervals. "
                "Higher is better."
            ),
            say("Bars of relative speed. {heard}.", heard=heard),
            [Key(known(name), COLOURS[scheme]) for scheme, name in NAMES.items()],
            Bars([BarGroup(race.where, _bars(race)) for race in both]),
        )
    ]


def _bars(race: Race) -> list[Bar]:
    most = max(race.best[scheme].rate for scheme in NAMES)
    return [
        Bar.single(
            speed.contestant,
            f"{speed.rate / most:.0%}",
            speed.rate / most,
            COLOURS[scheme],
            f"{speed.contestant}: {speed.rate / most:.1%}",
            interval=(speed.measured.low / most, speed.measured.high / most),
        )
        for scheme in NAMES
        if (speed := race.best[scheme])
    ]


def choice(races: Sequence[Race]) -> str:
    """Which of the two schemes, and by how much; too few rounds decide nothing."""
    races = [race for race in races if race.repetitions >= LEAST_ROUNDS]
    if not races:
        return say("each contestant was measured only once or twice, so neither scheme can be recommended.")
    faster = {name: [race for race in races if clearly(race, name)] for name in NAMES}
    tied = len(races) - sum(map(len, faster.values()))
    total = say(
        "{count} comparisons on several ranks" if len(races) > 1 else "{count} comparison on several ranks",
        count=len(races),
    )
    if not any(faster.values()):
        return say("either scheme will do. In {total}, the two are within noise of each other.", total=total)
    winner, loser = sorted(NAMES, key=lambda name: -len(faster[name]))
    if not faster[loser]:
        return say(
            "use {scheme}. It is faster in {count} of {total}, by {margins}{noise}.",
            scheme=known(NAMES[winner]),
            count=len(faster[winner]),
            total=total,
            margins=margins_in_words(faster[winner], winner, loser),
            noise=say("; within noise in {tied}", tied=tied) if tied else "",
        )
    return say(
        "it depends on the job. Of {total}, {one} is faster in {count}: by {margins}; {other} in {other_count}: by "
        "{other_margins}{noise}.",
        total=total,
        one=known(NAMES[winner]),
        count=len(faster[winner]),
        margins=margins_in_words(faster[winner], winner, loser),
        other=known(NAMES[loser]),
        other_count=len(faster[loser]),
        other_margins=margins_in_words(faster[loser], loser, winner),
        noise=say("; {tied} within noise", tied=tied) if tied else "",
    )


def clearly(race: Race, name: str) -> bool:
    """Whether this scheme is faster beyond noise."""
    (other,) = NAMES.keys() - {name}
    return race.lead(name, other) > 1 and not race.best[name].ties(race.best[other])


def margins_in_words(races: Sequence[Race], winner: str, loser: str) -> str:
    return span([(race.lead(winner, loser) - 1, race.where) for race in races])


def span(shares: Sequence[tuple[float, str]]) -> str:
    """
    >>> span([(0.1, "a"), (0.2, "b")]), span([(0.1, "a")])
    ('10% (a) to 20% (b)', '10% (a)')
    """
    (least, where_least), (most, where_most) = min(shares), max(shares)
    return say(
        "{most:.0%} ({where_most})"
        if f"{least:.0%}" == f"{most:.0%}"
        else "{least:.0%} ({where_least}) to {most:.0%} ({where_most})",
        least=least,
        where_least=where_least,
        most=most,
        where_most=where_most,
    )


def against_paddle(races: Sequence[Race]) -> Iterator[str]:
    """The best of ours against paddle.DataParallel; PyTorch's computes with kernels of its own."""
    rival = "paddle"
    if found := [against(race, rival) for race in races if rival in race.best and NAMES.keys() & race.best.keys()]:
        leads = say(", ").join(found)
        yield say("The better of the two against {rival}: {leads}.", rival=RIVALS[rival], leads=leads)


def against(race: Race, rival: str) -> str:
    best = max((name for name in NAMES if name in race.best), key=lambda name: race.best[name].rate)
    near = say(", within noise") if race.best[best].ties(race.best[rival]) else ""
    near = say(", measured once") if race.repetitions < 2 else near
    return say("{lead:.2f} times as fast ({where}{near})", lead=race.lead(best, rival), where=race.where, near=near)


def bounds(races: Sequence[Race], parts: Sequence[tuple[str, PartResults]]) -> Iterator[str]:
    """What faster communication could still gain, and how near it is to what the machine allows."""
    if shares := [(race.computing, race.where) for race in races if race.computing is not None]:
        yield say(
            "Headroom: the fastest contestant computes for {shares} of a step. A faster scheme can only save the "
            "rest, which is waiting and exposed communication.",
            shares=span(shares),
        )
    for title, results in parts:
        if isinstance(results, SweepResults) and (found := nearest_to_limit(results)):
            yield say("{title}: {sentence}.", title=title, sentence=found)


def races_in(title: str, results: PartResults) -> Iterator[Race]:
    """Those of a comparison, or of a program's, with several ranks and schemes."""
    if isinstance(results, CompareResults):
        for nranks, runs in groups(results):
            racing = [run for run in runs if in_step(run)]
            if nranks > 1 and racing:
                where = say("{title}, N={nranks}", title=title, nranks=nranks)
                yield race_of(where, [(run, of_training(run)) for run in racing])
    elif isinstance(results, ScriptResults) and results.certificate.passed:
        for nranks in sorted({run.nranks for run in results.runs} - {1}):
            where = say("{title}, N={nranks}", title=title, nranks=nranks)
            yield race_of(where, [(run, of_program(run)) for run in results.runs if run.nranks == nranks])


def race_of(where: str, speeds: Sequence[tuple[Run | ScriptRun, Speed]]) -> Race:
    best: dict[str, Speed] = {}
    for run, speed in speeds:
        if run.scheme not in best or speed.rate > best[run.scheme].rate:
            best[run.scheme] = speed
    fastest, _ = max(
        (each for each in speeds if each[0].scheme not in RIVALS), key=lambda each: each[1].rate, default=speeds[0]
    )
    phases = fastest.phases_ms if isinstance(fastest, Run) else {}
    share = sum(phases[name] for name in COMPUTING) / sum(phases.values()) if phases else None
    paired = are_paired(*(speed.measured for _, speed in speeds))
    return Race(where, best, share, min(run.repetitions for run, _ in speeds), paired)


def of_training(run: Run) -> Speed:
    return Speed(series(run), run.rate)


def of_program(run: ScriptRun) -> Speed:
    step = run.step
    rates = tuple(1e3 / each for each in step.rounds)
    return Speed(series(run), Measured(1e3 / step.median, 1e3 / step.high, 1e3 / step.low, rates))
