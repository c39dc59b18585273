"""`python -m benchmarks VERB`: compare, sweep, crossover, accuracy, faults, scale, programs, report, diff, results and
doctor."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any

from common.errors import UsageError, choose
from common.launch.cli import VERSION, run_command, split_script, to_reader
from common.system.process import die_with_parent

__all__ = ["main"]

VERBS = {  # flags and function; compare has several, see `compare`
    "sweep": ("benchmarks.flags.sweep:SweepConfig", "benchmarks.verbs.sweep:run_sweep"),
    "crossover": ("benchmarks.flags.crossover:CrossoverConfig", "benchmarks.verbs.crossover:run_crossover"),
    "accuracy": ("benchmarks.flags.accuracy:AccuracyConfig", "benchmarks.verbs.accuracy:accuracy"),
    "faults": ("benchmarks.verbs.faults:FaultsConfig", "benchmarks.verbs.faults:faults"),
    "scale": ("benchmarks.verbs.scale:ScaleConfig", "benchmarks.verbs.scale:scale"),
    "programs": ("benchmarks.verbs.programs:ProgramsConfig", "benchmarks.verbs.programs:programs"),
    "report": ("benchmarks.verbs.report:ReportConfig", "benchmarks.verbs.report:report_again"),
    "diff": ("benchmarks.verbs.diff:DiffConfig", "benchmarks.verbs.diff:diff"),
    "results": ("benchmarks.verbs.results:ResultsConfig", "benchmarks.verbs.results:list_results"),
    "doctor": ("benchmarks.verbs.doctor:DoctorConfig", "benchmarks.verbs.doctor:doctor"),
}
USAGE = """usage: python -m benchmarks compare [OPTIONS]                    the built-in training
       python -m benchmarks compare [OPTIONS] script.py ARGS...  your own Paddle program, unchanged
       python -m benchmarks compare --preset quick|full|accuracy [OPTIONS]
       python -m benchmarks compare --config job.toml [OPTIONS]  many comparisons, one report
       python -m benchmarks sweep [OPTIONS]                      all-reduce or broadcast, over sizes and ranks
       python -m benchmarks crossover [OPTIONS]                  which scheme wins, by size, link, ranks and servers
       python -m benchmarks accuracy [OPTIONS]                   wall time to a target accuracy, with stragglers
       python -m benchmarks programs --programs DIR [OPTIONS]    others' programs under Paddle and both schemes
       python -m benchmarks faults [OPTIONS]                     what goes wrong on purpose, and what comes of it
       python -m benchmarks scale [OPTIONS]                      groups of hundreds of ranks on this machine
       python -m benchmarks report RESULTS.json [--lang zh]      the report of a result file once more
       python -m benchmarks diff BEFORE AFTER                    two result files of one kind
       python -m benchmarks results                              write out/results.md from the committed results
       python -m benchmarks doctor                               what of this machine can be used

compare: prove that all schemes compute the same, then measure them. sweep: time the all-reduce beside other libraries'.
crossover: a step through parameter servers against a step by a ring, on emulated hosts (root).
accuracy: train to a target under every mode of the parameter server and the ring, with and without a slow rank.
programs: which of the public programs that lie in DIR work unmodified, and whether they train Paddle's bits.
faults: kill, freeze and cut off processes, and see whether each scheme keeps its promises.
scale: how long a large group takes to meet, what each rank holds, and how soon all name a killed one.
diff: what got faster or slower beyond noise. doctor: what is missing, and the command that mends it.
--help after the verb lists the options: compare --help for the built-in training, compare --help script.py for your
own program, compare --preset NAME --help for a preset. --version says which this is.
"""


def main() -> int:
    die_with_parent()  # where it is part of a larger job
    return to_reader(run_verb)


def run_verb() -> int:
    verb = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if verb in ("-h", "--help", "--version"):
        print(VERSION if verb == "--version" else USAGE)
        return 0
    try:
        choose("verb", verb, ("compare", *VERBS))
    except UsageError as exc:
        print(f"benchmarks: {exc}", file=sys.stderr)
        return exc.exit_code
    if verb == "doctor":  # says which credentials a job would have
        return other_verb(verb)
    from common.credentials.credentials import Credentials, using

    plain_text = Credentials("none", "benchmarks")  # as other libraries that are measured have it
    with using(plain_text, warn=False):
        return compare(sys.argv[2:]) if verb == "compare" else other_verb(verb)


def other_verb(verb: str) -> int:
    flags, function = map(loaded, VERBS[verb])  # no other verb's modules
    return run_command(flags, function, prog=f"benchmarks {verb}", args=sys.argv[2:])


def loaded(name: str) -> Any:
    """Of MODULE:NAME."""
    module, _, found = name.partition(":")
    return getattr(importlib.import_module(module), found)


def compare(args: Sequence[str]) -> int:
    """A job of several parts, a program of the user's, or the built-in training."""
    flags, script = split_script(args)
    if {"-h", "--help"} & {*script}:
        print(f"benchmarks compare: UsageError: {help_after(script)}", file=sys.stderr)
        return UsageError.exit_code
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


def help_after(script: Sequence[str]) -> str:
    """What to say where the program would only print its help, so that nothing would be compared."""
    name = script[0]
    return (
        f"--help after {name} is the program's own, and it would train nothing; the options of compare are listed by "
        f"python -m benchmarks compare --help {name}, the program's by python {name} --help"
    )


if __name__ == "__main__":
    sys.exit(main())
