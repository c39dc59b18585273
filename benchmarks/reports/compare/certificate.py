"""What the certificate of a comparison says of each contestant, and whether speeds may be shown."""

from __future__ import annotations

import re
from itertools import groupby
from typing import NamedTuple

from benchmarks.page.language import known, mark, say
from benchmarks.records.compare import CompareResults, Difference, Nearness
from benchmarks.reports.runs import Group

__all__ = [
    "Certified",
    "certified",
    "compared",
    "describe",
    "groups",
    "holds",
    "in_words",
    "remarks",
    "rivals",
]


APART = mark("another order by design")
NEAR = mark("≈ within the bound")
ABSENT = mark("– absent")
MARKS = {
    True: mark("✓ same bits"),
    False: mark("✗ differs"),
    None: mark("– alone"),
    APART: APART,
    NEAR: NEAR,
    ABSENT: ABSENT,
}


def in_words(same: bool | str | None) -> str:
    """What the certificate says of a contestant."""
    return known(MARKS[same])


class Certified(NamedTuple):
    """A contestant's line of the certificate; `same` is None where there was nobody to compare it with, APART where it
    is not meant to be, NEAR where it may differ a little, and ABSENT where a whole scheme did not take part."""

    contestant: str
    same: bool | str | None
    digest: str


def certified(results: CompareResults) -> list[Certified]:
    """The certificate, a line for each contestant."""
    certificate = results.certificate
    digests: dict[str, str] = certificate.schemes
    group_of = {name: group for group in certificate.groups for name in group.contestants}
    apart = certificate.other_order
    rivals = {found.contestant: found for found in certificate.peers}
    differing = {found.contestant for found in certificate.differences}

    def same(name: str) -> bool | str | None:
        if name in differing:  # be it from its own other ranks
            return False
        if name in apart:
            return APART
        if name in rivals:
            return NEAR if rivals[name].difference and rivals[name].within else bool(rivals[name].within)
        group = group_of.get(name)
        if group is None or len(group.contestants) < 2:
            return None
        return bool(digests[name] == group.sha256)

    there = [Certified(name, same(name), digest) for name, digest in digests.items()]
    return there + [Certified(name, ABSENT, "") for name in results.missing]


def holds(results: CompareResults) -> bool:
    """Whether speed may be shown: the certificate passed, and none of its lines says otherwise."""
    certificate = results.certificate
    passed = certificate.identical and certificate.passed
    return bool(passed) and all(line.same is not False for line in certified(results))


def rivals(results: CompareResults) -> list[str]:
    """The schemes of other libraries that the certificate compared with ours."""
    return list(dict.fromkeys(found.contestant.split()[0] for found in results.certificate.peers))


def compared(results: CompareResults) -> str:
    """How many contestants were held against each other, as in "4 at N=2, 2 at N=4"; "" if none were."""
    several = [group for group in results.certificate.groups if len(group.contestants) > 1]
    counts = [say("{count} at N={nranks}", count=len(g.contestants), nranks=g.nranks) for g in several]
    return say(", ").join(counts)


def groups(results: CompareResults) -> list[Group]:
    """The runs by number of ranks; none if the certificate failed."""
    runs = sorted(results.runs if holds(results) else [], key=lambda run: int(run.nranks))
    return [(nranks, list(group)) for nranks, group in groupby(runs, key=lambda run: int(run.nranks))]


def describe(difference: Difference) -> str:
    """One difference that the certificate found; where it lies may be unknown."""
    told = say("{one} against {other}", one=difference.contestant, other=_reference(difference.reference))
    if difference.bucket is not None:
        told += say(", bucket {bucket}", bucket=difference.bucket)
    if difference.parameter is not None:
        told += say(", parameter {parameter}", parameter=difference.parameter)
    if difference.max_abs is not None:
        told += say(", by up to {size:.3g}", size=difference.max_abs)
    return told


def _reference(text: str) -> str:
    """Another contestant, or, as the certificate has it, "its own rank 0 (rank 1 differs)"."""
    own = re.fullmatch(r"its own rank 0 \(rank (\d+) differs\)", text)
    return say("its own rank 0 (rank {rank} differs)", rank=own[1]) if own else text


def remarks(results: CompareResults) -> list[str]:
    """How far N ranks are from one process, and other libraries from ours."""
    whole = [(group.nranks, group.whole_batch) for group in results.certificate.groups]
    found = [
        (say("N={nranks} against one process on the whole batch", nranks=nranks), check)
        for nranks, check in whole
        if check is not None
    ]
    found += [
        (say("{one} against {other}", one=check.contestant, other=check.reference), check)
        for check in results.certificate.peers
    ]
    return [_distance(who, check) for who, check in found]


def _distance(who: str, check: Nearness) -> str:
    if check.within and (first := check.first_gradient):
        return say(
            "{who}: relative difference {difference:.1e}, above the bound of {bound:.0e}. The first gradients "
            "differ by {first:.1e}, within their bound of {near:.0e}: training amplified rounding.",
            who=who,
            difference=check.difference,
            bound=check.bound,
            first=first.difference,
            near=first.bound,
        )
    return say(
        "{who}: relative difference {difference:.1e}, within the bound of {bound:.0e}."
        if check.within
        else "{who}: relative difference {difference:.1e}, BEYOND the bound of {bound:.0e}.",
        who=who,
        difference=check.difference,
        bound=check.bound,
    )
