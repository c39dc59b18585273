"""What a person sees of a training: a progress line while it runs, a summary when it is done."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from common.trainer.record import RunRecord

__all__ = ["TrainingProgress", "print_summary"]


class TrainingProgress:
    """A progress bar with loss and time left, on rank 0 and on a terminal only; a context manager."""

    def __init__(self, rank: int) -> None:
        console = Console()
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=rank != 0 or not console.is_terminal,
        )
        self._task = self._progress.add_task("training", loss="", total=None)

    def __call__(self, step: int, total: int, loss: float) -> None:
        self._progress.update(self._task, completed=step, total=total, loss=f"loss {loss:.3f}")

    def __enter__(self) -> TrainingProgress:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()


def print_summary(record: RunRecord) -> None:
    """The run's figures on stdout, a line each."""
    servers = f", {record.servers} server{'s' * (record.servers > 1)}" if record.servers else ""
    servers += "" if record.mode == "sync" else f", mode {record.mode}"
    phases = ", ".join(f"{name} {value:.1f}" for name, value in record.phases_ms.items())
    lines = {
        "scheme": f"{record.scheme} over {record.backend}, {record.nranks} rank{'s' * (record.nranks > 1)}{servers}",
        "job": f"{record.model} on {record.dataset}, {record.optimizer} {record.learning_rate:g}, "
        f"batch {record.batch_size} a rank, {record.steps:,} steps",
        "throughput": f"{record.samples_per_s:,.0f} samples/s",
        "step": f"{record.step_ms.p50:.1f} ms median, {record.step_ms.p99:.1f} ms p99",
        "of which": f"{phases} ms",
        "loss": f"{record.loss.first:.3f} -> {record.loss.last:.3f}",
        "accuracy": "not evaluated" if record.accuracy is None else f"{100 * record.accuracy:.2f} % of the test split",
        "parameters": f"sha256 {record.parameters_sha256}",
    }
    console = Console(soft_wrap=True, highlight=False)
    for name, text in lines.items():
        console.print(f"[dim]{name:<11}[/dim]{text}")
