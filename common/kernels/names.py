"""What a kernel is called, and so what it does."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["COPY", "MEETING", "MIX", "MIX_AND_LOOK", "NEW", "REPEAT", "WAYS", "Reduce", "Whole"]

NEW = -1  # an output that is none of the inputs
COPY = "copy_lines"  # copy_lines.py
MIX, MIX_AND_LOOK = "mix_rows", "mix_and_look"  # mix_rows.py
MEETING = ("meet", "wait", "asleep", "awake")  # meeting.py
REPEAT = "repeat"  # repeat.py
WAYS = ("short", "placed", "staged", "paired")


class Reduce(NamedTuple):
    """Combine inputs element by element, in their order, and write the result to every output.

    Args:
        op: sum, mean or max; a mean is the sum times a factor that the caller gives.
        dtype: float32, float64, int32 or int64.
        inputs: how many.
        outputs: for each the number of the input that it is, or NEW; no other memory is shared.
        watched: it also tells which inputs had a value that is not finite.
    """

    op: str
    dtype: str
    inputs: int
    outputs: tuple[int, ...]
    watched: bool = False

    def siblings(self) -> list[Reduce]:
        """All that there are of this op, dtype and number of inputs: what is written is one new array, the last input,
        both, or all inputs; of two also the first. A mean of floats into all inputs may be watched. Compiled together,
        for whoever needs one soon needs another."""
        last, everywhere = self.inputs - 1, tuple(range(self.inputs))
        every = [(NEW,), (last,), (NEW, last), everywhere, *[(0,)] * (self.inputs == 2)]
        plain = [self._replace(outputs=outputs, watched=False) for outputs in every]
        is_mean_of_floats = self.op == "mean" and self.dtype.startswith("float")
        return plain + [self._replace(outputs=everywhere, watched=True)] * is_mean_of_floats

    def __str__(self) -> str:
        outputs = "-".join("new" if number == NEW else str(number) for number in self.outputs)
        return f"{self.op}-{self.dtype}-of-{self.inputs}-to-{outputs}" + "-watched" * self.watched

    @staticmethod
    def of(name: str) -> Reduce:
        """The kernel of that name.

        >>> Reduce.of("mean-float32-of-2-to-1-new")
        Reduce(op='mean', dtype='float32', inputs=2, outputs=(1, -1), watched=False)
        """
        plain = name.removesuffix("-watched")
        op, dtype, _, inputs, _, *numbers = plain.split("-")
        outputs = tuple(NEW if each == "new" else int(each) for each in numbers)
        return Reduce(op, dtype, int(inputs), outputs, watched=plain != name)


class Whole(NamedTuple):
    """A whole reduction over `nranks` ranks, meetings among it (whole_calls.py); op and dtype as of Reduce.

    Args:
        way: of WAYS.
    """

    way: str
    op: str
    dtype: str
    nranks: int

    def family(self) -> list[Whole | Reduce]:
        """All kernels of this op, dtype and number of ranks, compiled together: a job that reduces so needs most."""
        ways: list[Whole | Reduce] = [self._replace(way=way) for way in WAYS if way != "paired" or self.nranks == 2]
        return ways + Reduce(self.op, self.dtype, self.nranks, ()).siblings()

    def __str__(self) -> str:
        return f"{self.way}-{self.op}-{self.dtype}-of-{self.nranks}"

    @staticmethod
    def of(name: str) -> Whole:
        """
        >>> Whole.of("short-mean-float32-of-2")
        Whole(way='short', op='mean', dtype='float32', nranks=2)
        """
        way, op, dtype, _, nranks = name.split("-")
        return Whole(way, op, dtype, int(nranks))
