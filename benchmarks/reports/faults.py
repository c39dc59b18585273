"""The report of what went wrong on purpose (faults.json): promises kept, how soon faults were noticed and mended."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from benchmarks.page.charts import Bar, BarGroup, Bars, Segment
from benchmarks.page.document import Bullets, Cell, Key, Paragraph, Plot, Report, Row, Section, Table
from benchmarks.page.language import mark, say
from benchmarks.page.reasons import in_words, reason
from benchmarks.records.faults import FaultOutcome, FaultsResults, Usage
from benchmarks.reports.facts import environment
from benchmarks.reports.runs import KNOWN

__all__ = ["heads", "report", "scoreboard", "verdict"]

CASES = (  # and promises, and processes, as the results name them
    mark("kill -9 of a rank"),
    mark("kill -9 of the server"),
    mark("kill -9 of the rank where all met"),
    mark("a rank frozen"),
    mark("the server frozen"),
    mark("the rank where all met frozen"),
    mark("a rank frozen for {seconds} s"),
    mark("the server frozen for {seconds} s"),
    mark("the rank where all met frozen for {seconds} s"),
    mark("a link cut"),
    mark("a link cut for {seconds} s"),
    mark("a link that carries nothing to the others"),
    mark("a link that carries nothing to the others for {seconds} s"),
    mark("a link that carries nothing from the others"),
    mark("a link that carries nothing from the others for {seconds} s"),
    mark("{share} % of the packets lost"),
    mark("{share} % of the packets twice"),
    mark("{share} % of the packets late, behind later ones"),
    mark("a message lost"),
    mark("a message doubled"),
    mark("a message overtaken"),
    mark("a message delayed"),
    mark("a message of an old epoch"),
    mark("bits flip, over TLS"),
    mark("bits flip, with --insecure"),
    mark("a named error"),
    mark("random kills, {nranks} ranks"),
    mark("{steps} steps, {kills} kills"),
    mark("{count} seeds"),
    mark("{error} within {seconds} s"),
    mark("the bits of an undisturbed run"),
    mark("the bits of an undisturbed run, or a named error"),
    mark("the bits of an undisturbed job"),
    mark("the bits of an undisturbed job, and no process grows"),
    mark("each message once, and the bits of an undisturbed run"),
    mark("the bits of an undisturbed job, or RecoveryFailed once restarts are used up"),
    mark("launcher"),
    mark("server {index}"),
)
COLOURS = {"ps": KNOWN["ps/shm"], "ring": KNOWN["ring/shm"], "": KNOWN["local"]}


def verdict(results: FaultsResults) -> list[str]:
    """A sentence for each scheme, one for each promise that was broken, and what could not be tried."""
    told = [_sentence(scheme, made) for scheme, made in _by_scheme(results)]
    told += [
        say(
            "Not kept: {scheme}, {what}: {kept} of {times} times; first: {why}.",
            scheme=_name(each.scheme),
            what=_words(each.name),
            kept=each.kept,
            times=each.times,
            why=each.why_not,
        )
        for each in results.outcomes
        if each.kept < each.times
    ]
    skipped = [each for each in results.outcomes if each.skipped]
    if skipped:
        told.append(say("{count} cases could not be tried here, see below.", count=len(skipped)))
    return told


def _sentence(scheme: str, made: Sequence[FaultOutcome]) -> str:
    kept, times = sum(each.kept for each in made), sum(each.times for each in made)
    told = say("{scheme}: {kept} of {times} promises kept", scheme=_name(scheme), kept=kept, times=times)
    if noticed := [seconds for each in made for seconds in each.detection_s]:
        told += say(
            "; faults were noticed after {p50:.2f} s (median), {most:.2f} s at most",
            p50=median(noticed),
            most=max(noticed),
        )
    if whole := [recovery.whole_s for each in made for recovery in each.recoveries]:
        told += say(
            "; jobs were complete again after {p50:.1f} s (median), {most:.1f} s at most",
            p50=median(whole),
            most=max(whole),
        )
    return told + say(".")


def _by_scheme(results: FaultsResults) -> list[tuple[str, list[FaultOutcome]]]:
    """What was made of each; in results of before, what was simulated comes under ""."""
    made = [each for each in results.outcomes if not each.skipped]
    return [(scheme, [e for e in made if e.scheme == scheme]) for scheme in dict.fromkeys(e.scheme for e in made)]


def _name(scheme: str) -> str:
    return scheme or say("simulated")


def _words(text: str) -> str:
    return in_words(text, CASES)


def report(results: FaultsResults) -> Report:
    return Report(
        say("GradSync: what becomes of a job when something goes wrong"),
        verdict(results),
        [
            *(Section.of(plot) for plot in (_recoveries(results), _detections(results)) if plot),
            Section(
                say("Promises"),
                [
                    _scores(results),
                    Table(say("Each case"), _case_heads(), [list(map(_case, results.outcomes))], wide=True),
                    Paragraph(
                        say(
                            "Rows are those of the table of faults in docs/benchmarks.md. Noticed: by each process, "
                            "from the fault on."
                        ),
                        muted=True,
                    ),
                ],
            ),
            *_soaks(results),
            *_reasons(results),
        ],
        [environment(results)],
        failed=any(each.kept < each.times for each in results.outcomes),
    )


def heads() -> list[str]:
    """Of the scoreboard."""
    seconds = [say("noticed\nmedian, s"), say("\nmost, s"), say("complete again\nmedian, s"), say("\nmost, s")]
    return [say("scheme"), say("promises kept"), say("of"), *seconds, say("replayed\nmost steps")]


def scoreboard(results: FaultsResults) -> list[list[str]]:
    """A line a scheme: promises kept, of how many, how soon faults were noticed and the job was complete again."""
    found = []
    for scheme, made in _by_scheme(results):
        noticed = [seconds for each in made for seconds in each.detection_s]
        whole = [recovery.whole_s for each in made for recovery in each.recoveries]
        counts = [str(sum(each.kept for each in made)), str(sum(each.times for each in made))]
        again = [e.replayed for each in made for e in each.recoveries if e.replayed is not None]
        seconds = (*_middle_and_most(noticed, 2), *_middle_and_most(whole, 1))
        found.append([_name(scheme), *counts, *seconds, str(max(again)) if again else "-"])
    return found


def _middle_and_most(seconds: Sequence[float], digits: int) -> tuple[str, str]:
    return (f"{median(seconds):.{digits}f}", f"{max(seconds):.{digits}f}") if seconds else ("-", "-")


def _scores(results: FaultsResults) -> Table:
    return Table(say("Scoreboard"), heads(), [[Row(cells) for cells in scoreboard(results)]], figures=True)


def _case_heads() -> list[str]:
    seconds = [say("noticed\nmedian, s"), say("\nmost, s"), say("complete again\nmedian, s"), say("\nmost, s")]
    return [say("row"), say("scheme"), say("what"), say("promised"), say("kept"), *seconds]


def _case(each: FaultOutcome) -> Row:
    look = "muted" if each.skipped else "good" if each.kept == each.times else "bad"
    kept = say("not tried") if each.skipped else say("{kept} of {times}", kept=each.kept, times=each.times)
    whole = [recovery.whole_s for recovery in each.recoveries]
    seconds = (*_middle_and_most(each.detection_s, 2), *_middle_and_most(whole, 1))
    backend = say("simulated") if each.backend == "simulated" else each.backend
    where = f"{_name(each.scheme)} {backend}".strip()
    return Row((str(each.row), where, _words(each.name), _words(each.promise), Cell(kept, look), *seconds))


def _recoveries(results: FaultsResults) -> Plot | None:
    """How long jobs were not whole: the medians, and the longest."""
    cases = [each for each in results.outcomes if each.recoveries]
    if not cases:
        return None
    bars = [_recovery(each) for each in cases]
    return Plot(
        "faults-recoveries",
        say("How soon the job is complete again"),
        say(
            "Seconds from a kill until the group was complete again, medians: grey the new process's start and "
            "imports, coloured all the rest. Lines reach from the shortest to the longest. Lower is better."
        ),
        say("Bars of seconds: {heard}.", heard=say(", ").join(f"{bar.name} {bar.text}" for bar in bars)),
        [Key(say("all but that, {scheme}", scheme=s), COLOURS[s]) for s in _schemes(cases)]
        + [Key(say("the new process's start and imports"), COLOURS[""])],
        Bars([BarGroup(_name(s), [_recovery(e) for e in cases if e.scheme == s]) for s in _schemes(cases)]),
    )


def _recovery(each: FaultOutcome) -> Bar:
    whole = [recovery.whole_s for recovery in each.recoveries]
    rest = median(recovery.whole_s - recovery.starting_s for recovery in each.recoveries)
    middle = median(whole)
    words = say(
        "{name}: complete again after {whole:.1f} s (median of {count}), {most:.1f} s at most; beside the new "
        "process's start {rest:.1f} s",
        name=_words(each.name),
        whole=middle,
        count=len(whole),
        most=max(whole),
        rest=rest,
    )
    parts = [Segment(rest, COLOURS[each.scheme], words), Segment(middle - rest, COLOURS[""], words)]
    return Bar(_words(each.name), f"{middle:.1f} s", parts, (min(whole), max(whole)))


def _detections(results: FaultsResults) -> Plot | None:
    """How soon others noticed."""
    cases = [each for each in results.outcomes if each.detection_s]
    if not cases:
        return None
    bars = {scheme: [_detection(e) for e in cases if e.scheme == scheme] for scheme in _schemes(cases)}
    heard = [f"{_name(scheme)} {bar.name} {bar.text}" for scheme, mine in bars.items() for bar in mine]
    return Plot(
        "faults-detections",
        say("How soon a fault is noticed"),
        say(
            "Seconds from the fault until each of the others named it, medians. Lines reach from the first to the last "
            "one. What is frozen or cut off is noticed after the timeout, 2 s here. Lower is better."
        ),
        say("Bars of seconds: {heard}.", heard=say(", ").join(heard)),
        [],
        Bars([BarGroup(_name(scheme), mine) for scheme, mine in bars.items()]),
    )


def _detection(each: FaultOutcome) -> Bar:
    middle, most = median(each.detection_s), max(each.detection_s)
    name = say("{case}, {backend}", case=_words(each.name), backend=each.backend)
    words = say("{name}: {p50:.2f} s, {most:.2f} s at most", name=name, p50=middle, most=most)
    ends = (min(each.detection_s), most)
    return Bar.single(name, f"{middle:.2f} s", middle, COLOURS[each.scheme], words, interval=ends)


def _schemes(cases: Sequence[FaultOutcome]) -> list[str]:
    return list(dict.fromkeys(each.scheme for each in cases))


def _soaks(results: FaultsResults) -> list[Section]:
    """What processes of a long job had, before the first kill and the last."""
    soaks = [each for each in results.outcomes if each.usage]
    if not soaks:
        return []
    arrow = "{} → {}".format
    rows = []
    for each in soaks:
        mine: dict[str, list[Usage]] = {}
        for process in (process for sample in each.usage for process in sample):
            mine.setdefault(process.who, []).append(process)
        for who, found in mine.items():
            first, last = found[0], found[-1]
            memory = arrow(f"{first.memory_mb:.0f}", f"{last.memory_mb:.0f}")
            counts = (arrow(first.descriptors, last.descriptors), arrow(first.threads, last.threads))
            rows.append(Row((each.scheme, _words(each.name), _words(who), memory, *counts)))
    columns = (say("scheme"), say("what"), say("process"), say("memory MB"), say("descriptors"), say("threads"))
    title = say("Before the first kill and before the last")
    return [Section(say("Does anything grow?"), [Table(title, columns, [rows])])]


def _reasons(results: FaultsResults) -> list[Section]:
    lines = [
        say(
            "{scheme} {backend}, {case}: {why}.",
            scheme=s.scheme,
            backend=s.backend,
            case=_words(s.name),
            why=reason(s.skipped),
        )
        for s in results.outcomes
        if s.skipped
    ]
    return [Section(say("Not tried"), [Bullets(lines)])] if lines else []
