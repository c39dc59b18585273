"""`python -m benchmarks VERB`: compare, sweep, crossover, accuracy, report, diff, results, doctor."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from common.errors import UsageError, choose
from common.launch.cli import run_command, split_script
from common.system.process import die_with_parent

__all__ = ["main"]

VERBS = ("compare", "sweep", "crossover", "accuracy", "report", "diff", "results", "doctor")
USAGE = """usage: python -m benchmarks compare [OPTIONS]                    the built-in training
       python -m benchmarks compare [OPTIONS] script.py ARGS...  your own Paddle program, unchanged
       python -m benchmarks compare --preset quick|full|accuracy [OPTIONS]
       python -m benchmarks compare --config job.toml [OPTIONS]  many comparisons, one report
       python -m benchmarks sweep [OPTIONS]                      all-reduce or broadcast, over sizes and ranks
       python -m benchmarks crossover [OPTIONS]                  which scheme wins, by size, link, ranks and servers
       python -m benchmarks accuracy [OPTIONS]                   wall time to a target accuracy, with stragglers
       python -m benchmarks report RESULTS.json [--lang zh]      the report of a result file once more
       python -m benchmarks diff BEFORE AFTER                    two result files of one kind
       python -m benchmarks results                              write out/results.md from the committed results
       python -m benchmarks doctor                               what of this machine can be used

compare: prove that all schemes compute the same, then measure them. sweep: time the all-reduce beside other libraries'.
crossover: a step through parameter servers against a step by a ring, on emulated hosts (root).
accuracy: train to a target under every mode of the parameter server and the ring, with and without a slow rank.
diff: what got faster or slower beyond noise. doctor: what is missing, and the command that mends it.
--help after the verb (and after --preset NAME) lists the options.
"""


def main() -> int:
    die_with_parent()  # where it is part of a larger job
    verb = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if verb in ("-h", "--help"):
        print(USAGE)
        return 0
    try:
        choose("verb", verb, VERBS)
    except UsageError as exc:
        print(f"benchmarks: {exc}", file=sys.stderr)
        return exc.exit_code
    if verb == "sweep":
        from benchmarks.flags.sweep import SweepConfig
        from benchmarks.verbs.sweep import run_sweep

        return run_command(SweepConfig, run_sweep, prog="benchmarks sweep", args=sys.argv[2:])
    if verb == "crossover":
        from benchmarks.flags.crossover import CrossoverConfig
        from benchmarks.verbs.crossover import run_crossover

        return run_command(CrossoverConfig, run_crossover, prog="benchmarks crossover", args=sys.argv[2:])
    if verb == "results":
        from benchmarks.verbs.results import ResultsConfig, list_results

        return run_command(ResultsConfig, list_results, prog="benchmarks results", args=sys.argv[2:])
    if verb == "report":
        from benchmarks.verbs.report import ReportConfig, report_again

        return run_command(ReportConfig, report_again, prog="benchmarks report", args=sys.argv[2:])
    if verb == "accuracy":
        from benchmarks.flags.accuracy import AccuracyConfig
        from benchmarks.verbs.accuracy import accuracy

        return run_command(AccuracyConfig, accuracy, prog="benchmarks accuracy", args=sys.argv[2:])
    if verb == "doctor":
        from benchmarks.verbs.doctor import DoctorConfig, doctor

        return run_command(DoctorConfig, doctor, prog="benchmarks doctor", args=sys.argv[2:])
    if verb == "diff":
        from benchmarks.verbs.diff import DiffConfig, diff

        return run_command(DiffConfig, diff, prog="benchmarks diff", args=sys.argv[2:])
    return compare(sys.argv[2:])


def compare(args: Sequence[str]) -> int:
    """A job of several parts, a program of the user's, or the built-in training."""
    flags, script = split_script(args)
    if not script and any(word.partition("=")[0] in ("--preset", "--config") for word in flags):
        from benchmarks.verbs.suite import SuiteConfig, run_suite

        return run_command(SuiteConfig, run_suite, prog="benchmarks compare", args=flags)
    if script:
        from benchmarks.flags.script import CompareScriptConfig
        from benchmarks.verbs.script import compare_script

        return run_command(
            CompareScriptConfig, lambda config: compare_script(config, script), prog="benchmarks compare", args=flags
        )
    from benchmarks.flags.compare import CompareConfig
    from benchmarks.verbs.compare import compare as compare_built_in

    return run_command(CompareConfig, compare_built_in, prog="benchmarks compare", args=flags)


if __name__ == "__main__":
    sys.exit(main())
