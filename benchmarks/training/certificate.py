"""The certificate: a few steps under every scheme from one seed must end in the same bits.

Schemes are compared at equal nranks. That the ranks together do what one process does at the whole batch can hold
only within a bound, because its sums run in another order. Modes of the parameter server that have another order by
design (ssp, async, geo) are run too; their ranks must agree with one another in the end, and no more is claimed.
Paddle's own DataParallel and PyTorch's must agree within the same bound as the whole batch. Some trainings multiply
rounding beyond any bound: where a ReLU's input is nearly zero, one order of the sums may switch a unit on that another
leaves off, and an optimizer that divides by the gradient's size makes that a whole step. Where the parameters are too
far apart, but no farther than such steps take them, the first gradients decide, which nothing has multiplied yet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
from msgspec import structs
from msgspec.structs import asdict

from benchmarks.contestants.table_of_trainings import Contestant
from benchmarks.records.compare import Certificate, Difference, Distance, Group, Nearness, Rival
from benchmarks.training.pool import WorkerPool
from common.errors import CertificateFailed
from common.launch.flags import TrainingConfig
from common.tensors.arena import Layout
from common.tensors.buckets import plan_buckets

__all__ = ["WHOLE_BATCH_BOUND", "certify", "require_identical", "require_same_on_all_ranks"]

CERTIFICATE_STEPS = 5
WHOLE_BATCH_BOUND = 1e-4
"""Largest accepted distance between the parameters of N ranks and of one process at the whole batch, relative to how
far training has moved them (L2 norms). float32 sums in another order differ by some 1e-7 of their size; Adam divides
and Adagrad divide by the gradient's own magnitude and so pass on rounding noise where gradients are nearly zero. The
largest seen was 1.2e-5, over 6 optimizers, 2 data sets, 2 models, N = 2 and 4, 2 seeds; but 2.8e-3 of an MLP of 25
million parameters under Adam."""
FIRST_GRADIENT_BOUND = 1e-5
"""Largest accepted distance between the means of the first gradients, relative to their size (L2 norms), where that is
exceeded. Of four that are alike, one left out of the sum changes it by a quarter."""
MULTIPLIED_BOUND = 0.1
"""Largest distance between parameters that first gradients can excuse; the largest seen was 2e-2. Farther apart,
perhaps another optimizer was at work, or other batches after the first, of which first gradients know nothing."""

Parameters = dict[str, npt.NDArray[np.float32]]  # name -> [2, *shape]: before and after training


def certify(
    pool: WorkerPool,
    contestants: Sequence[Contestant],
    config: TrainingConfig,
    folder: Path,
    *,
    on_run: Callable[..., None],
) -> Certificate:
    """Run every contestant for a few steps and compare.

    Args:
        folder: for the parameters of each run, kept while they may have to be compared.
        on_run: told what is about to run.
    """
    found = Found()
    for nranks in sorted({c.nranks for c in contestants}):
        group = [c for c in contestants if c.nranks == nranks]
        short = replace(config.for_ranks(nranks), steps=CERTIFICATE_STEPS, epochs=None)
        for contestant in group:
            on_run(f"certificate: {contestant.name}")
            records = pool.run(contestant, short, warmup_steps=0, evaluate=False, keep=_file(folder, contestant))
            found.digests[contestant.name] = records[0].parameters_sha256
            found.differences += _between_ranks(contestant, records)
        if exact := [c for c in group if c.exact]:
            if nranks > 1:
                on_run(f"certificate: one process at the batch of {nranks}")
            _compare(group, exact, pool, short, folder, found)
    whole = [g.whole_batch for g in found.groups if g.whole_batch]
    return Certificate(
        identical=not found.differences,
        passed=not found.differences and all(each.within for each in (*whole, *found.peers)),
        steps=CERTIFICATE_STEPS,
        schemes=found.digests,
        groups=found.groups,
        other_order=[c.name for c in contestants if not c.in_step],
        peers=found.peers,
        differences=found.differences,
    )


@dataclass
class Found:
    """What a certificate is made of."""

    digests: dict[str, str] = field(default_factory=dict)
    differences: list[Difference] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    peers: list[Rival] = field(default_factory=list)


def _compare(
    group: Sequence[Contestant],
    exact: Sequence[Contestant],
    pool: WorkerPool,
    config: TrainingConfig,
    folder: Path,
    found: Found,
) -> None:
    """All of one number of ranks with the first of those that must be equal, and that one with one process."""
    reference, nranks = exact[0], exact[0].nranks
    digest = found.digests[reference.name]
    unequal = [c for c in exact if found.digests[c.name] != digest]
    found.peers += [_against(c, reference, pool, config, folder) for c in group if c.in_step and not c.exact]
    found.differences += [d for c in unequal for d in _locate(folder, c, reference)]
    found.groups.append(
        Group(
            nranks=nranks,
            identical=not unequal,
            contestants=[c.name for c in exact],
            sha256=digest,
            whole_batch=_whole_batch(pool, config, reference, folder) if nranks > 1 else None,
        )
    )


class Ended(Protocol):
    """A training's record, as far as its bits are concerned."""

    @property
    def parameters_sha256(self) -> str: ...

    @property
    def steps(self) -> int: ...


def require_identical(runs: Mapping[Contestant, Sequence[Ended]]) -> None:
    """The measured trainings, too, must have ended in the same bits, in every repetition.

    Raises:
        CertificateFailed: naming two that did not.
    """
    seen: dict[int, tuple[str, str]] = {}
    for contestant, repetitions in runs.items():
        for record in repetitions if contestant.exact else ():
            name, digest = seen.setdefault(contestant.nranks, (contestant.name, record.parameters_sha256))
            if record.parameters_sha256 != digest:
                raise CertificateFailed(
                    f"after {record.steps} measured steps {contestant.name} has other parameters than {name}"
                )


def require_same_on_all_ranks(contestant: Contestant, records: Sequence[Ended], after: str) -> None:
    """Of one training, `after` so many steps.

    Raises:
        CertificateFailed: naming the first rank that has other parameters.
    """
    for rank, record in enumerate(records):
        if record.parameters_sha256 != records[0].parameters_sha256:
            raise CertificateFailed(f"{after} rank {rank} of {contestant.name} has other parameters than its rank 0")


def _between_ranks(contestant: Contestant, records: Sequence[Ended]) -> list[Difference]:
    return [
        Difference(
            contestant=contestant.name,
            reference=f"its own rank 0 (rank {rank} differs)",
            bucket=None,
            parameter=None,
            max_abs=None,
        )
        for rank, record in enumerate(records)
        if record.parameters_sha256 != records[0].parameters_sha256
    ]


def _locate(folder: Path, contestant: Contestant, reference: Contestant) -> list[Difference]:
    """Which parameters differ, in which bucket, and by how much."""
    mine, theirs = _load(_file(folder, contestant)), _load(_file(folder, reference))
    layout = Layout.of((name, pair.shape[1:]) for name, pair in mine.items())
    buckets = plan_buckets([slot.start for slot in layout.slots], layout.length)
    return [
        Difference(
            contestant=contestant.name,
            reference=reference.name,
            bucket=next(i for i, b in enumerate(buckets) if b.start <= slot.start < b.stop),
            parameter=slot.name,
            max_abs=float(np.abs(mine[slot.name][1] - theirs[slot.name][1]).max()),
        )
        for slot in layout.slots
        if not np.array_equal(mine[slot.name][1], theirs[slot.name][1])
    ]


def _against(rival: Contestant, reference: Contestant, pool: WorkerPool, config: TrainingConfig, folder: Path) -> Rival:
    """Another library against ours: the same computation, but three ranks, or a kernel's sums, are added in another
    order."""
    difference = relative_difference(_load(_file(folder, rival)), _load(_file(folder, reference)))
    found = _judged(difference, pool, [(rival, config), (reference, config)], folder)
    return Rival(contestant=rival.name, reference=reference.name, **asdict(found))


def _whole_batch(pool: WorkerPool, config: TrainingConfig, reference: Contestant, folder: Path) -> Nearness:
    """Compare with one process that takes all ranks' batches as one."""
    one = Contestant("local", "none", 1)
    file = folder / f"whole-{reference.nranks}.npz"
    whole_config = replace(config, batch_size=config.batch_size * reference.nranks)
    pool.run(one, whole_config, warmup_steps=0, evaluate=False, keep=file)
    difference = relative_difference(_load(_file(folder, reference)), _load(file))
    return _judged(difference, pool, [(reference, config), (one, whole_config)], folder)


def _judged(
    difference: float, pool: WorkerPool, both: Sequence[tuple[Contestant, TrainingConfig]], folder: Path
) -> Nearness:
    """Whether two trainings are near enough: after all steps, or, if not by much, in their `first_gradient`.

    What one step of SGD changes is the mean gradient; at a rate that large, the parameters themselves leave no mark.
    """
    found = Nearness(difference=difference, bound=WHOLE_BATCH_BOUND, within=difference <= WHOLE_BATCH_BOUND)
    if found.within or difference > MULTIPLIED_BOUND:
        return found
    ends = []
    for number, (contestant, config) in enumerate(both):
        file = folder / f"first-gradient-{number}.npz"
        trained = {each.name: getattr(config, each.name) for each in fields(TrainingConfig)}  # no flags of a comparison
        once = TrainingConfig(**{**trained, "steps": 1, "optimizer": "sgd", "lr": 1e6})
        pool.run(contestant, once, warmup_steps=0, evaluate=False, keep=file)
        ends.append(_load(file))
    first = Distance(difference=relative_difference(*ends), bound=FIRST_GRADIENT_BOUND)
    return structs.replace(found, within=first.difference <= FIRST_GRADIENT_BOUND, first_gradient=first)


def relative_difference(mine: Parameters, whole: Parameters) -> float:
    """Distance between two results, relative to how far training moved the second (L2 norms, in float64)."""
    apart = sum(float(np.square(mine[n][1].astype(float) - whole[n][1]).sum()) for n in whole)
    moved = sum(float(np.square(whole[n][1].astype(float) - whole[n][0]).sum()) for n in whole)
    return float(np.sqrt(apart / moved)) if moved else float(apart > 0)


def _file(folder: Path, contestant: Contestant) -> Path:
    return folder / f"{contestant.stem}.npz"


def _load(path: Path) -> Parameters:
    with np.load(path, allow_pickle=False) as stored:
        return {name: stored[name] for name in stored.files}
