"""The report of large groups (scale.json): whether they came together, what each rank holds, how a death is named."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.page.document import Paragraph, Report, Row, Section, Table
from benchmarks.page.language import say
from benchmarks.records.scale import ScaleResults
from benchmarks.reports.facts import environment

__all__ = ["columns", "report", "rows", "verdict"]


def verdict(results: ScaleResults) -> list[str]:
    """A sentence for each group."""
    return [
        say(
            "{nranks} ranks over {backend}: complete {complete:.1f} s after all had imported; {sockets} sockets and "
            "{threads} threads a rank at most, besides rank 0; a killed rank named by {named} of {others} others, the "
            "last after {last:.2f} s.",
            nranks=each.nranks,
            backend=each.backend,
            complete=each.complete_s,
            sockets=each.sockets[1],
            threads=each.threads[1],
            named=each.named,
            others=each.nranks - 1,
            last=each.named_s,
        )
        for each in results.groups
    ]


def report(results: ScaleResults) -> Report:
    return Report(
        say("GradSync: large groups on one machine"),
        verdict(results),
        [
            Section(
                say("Groups that were started"),
                [
                    _groups(results),
                    Paragraph(
                        say("Sockets, descriptors and threads: the most of a rank besides rank 0 / of rank 0."),
                        muted=True,
                    ),
                ],
            ),
            Section(say("What a group does at its start"), [_counts(results)]),
        ],
        [environment(results)],
        failed=any(each.named < each.nranks - 1 for each in results.groups),
    )


def _groups(results: ScaleResults) -> Table:
    body = [Row(cells) for cells in rows(results)]
    return Table(say("Ranks that train nothing"), columns(), [body], figures=True, names=2)


def columns() -> list[str]:
    """Of the groups."""
    held = [say("sockets"), say("descriptors"), say("threads")]
    ends = [say("named by"), say("named by all\nafter, s")]
    return [say("ranks"), say("backend"), say("complete\nafter, s"), *held, *ends]


def rows(results: ScaleResults) -> list[list[str]]:
    found = []
    for each in results.groups:
        held = [_most_and_first(figures) for figures in (each.sockets, each.descriptors, each.threads)]
        named = say("{count} of {others}", count=each.named, others=each.nranks - 1)
        found.append(
            [str(each.nranks), each.backend, f"{each.complete_s:.1f}", *held, named, f"{each.named_s:.2f}"],
        )
    return found


def _most_and_first(figures: Sequence[int]) -> str:
    _, most, first = figures
    return f"{most} / {first}"


def _counts(results: ScaleResults) -> Table:
    heads = [say("ranks"), say("joins at rank 0"), say("its answers\nMB in all"), say("connections\nshm")]
    heads += [say("\ntcp"), say("\neach with each, tcp"), say("steps of a word\nto all")]
    heads += [say("segments passed on\nmost")]
    body = [
        Row(
            [
                f"{each.nranks:,}",
                f"{each.joins:,}",
                f"{each.joins * each.reply_bytes / 1e6:.1f}",
                str(each.connections_shm),
                str(each.connections_tcp),
                f"{each.all_with_all:,}",
                str(each.steps),
                str(each.passed_on),
            ]
        )
        for each in results.at_start
    ]
    return Table(say("Counted, of a rank on one host"), heads, [body], figures=True)
