"""Which way imports point, where Paddle is touched, and that every module says what it is and exports."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache

import pytest

from tests.support.groups import ROOT

PACKAGES = ("benchmarks", "collective", "common", "ps")
MAY_IMPORT = {
    "common": {"common"},
    "collective": {"collective", "common"},
    "ps": {"ps", "common"},
    "benchmarks": set(PACKAGES),
}
PADDLE_AT_THE_TOP = {
    "common/paddle_api/communication/paddles_maps.py",
    "common/paddle_api/refusals.py",
    "common/paddle_api/backward.py",
    "common/paddle_api/sparse_gradients.py",
    "common/paddle_api/wrapped_models.py",
    "common/paddle_api/user_optimizer.py",
    "common/paddle_api/communication/groups.py",
    "common/paddle_api/communication/objects.py",
    "common/paddle_api/communication/stream.py",
    "common/paddle_api/communication/tensors.py",
    "common/paddle_api/data_parallel.py",
    "common/tensors/flat_optimizer.py",
    "common/paddle_api/optimizer_hook.py",
    "common/paddle_api/gradient_reads.py",
    "common/paddle_api/arena_binding.py",
    "common/trainer/models.py",
    "common/trainer/step_copies.py",
    "common/paddle_api/fleet_api.py",
    "common/paddle_api/fleet_places.py",
    "common/paddle_api/fleet_util.py",
    "common/paddle_api/hybrid_groups.py",
    "common/paddle_api/parallel_env.py",
    "common/paddle_api/random_states.py",
    "common/paddle_api/data_position.py",
    "common/paddle_api/training_state.py",
    "common/trainer/training.py",
    "ps/optimizer.py",
}
PADDLE_IN_FUNCTIONS = PADDLE_AT_THE_TOP | {
    "common/commit/export.py",  # paddle.save
    "common/trainer/data.py",  # its sampler, and its cache of data sets
    "common/trainer/entry.py",  # paddle.save of --save
    "common/paddle_api/loading.py",  # so that a process chooses when
    "benchmarks/contestants/paddle_training.py",  # is Paddle's own training
    "benchmarks/training/worker.py",  # loads it before the first job, so that no job is timed with it
    "benchmarks/programs/recording/sitecustomize.py",  # notes what a program trains under Paddle too
    "benchmarks/training/script_worker.py",  # notes the models of a program under Paddle too
}
GENERATED = ("_pb2.py", "_pb2_grpc.py")
PADDLE_FREE = (
    "collective",
    "collective.run",
    "collective.group",
    "collective.command_flags",
    "collective.synchronizer",
    "collective.nccl.binding",
    "collective.nccl.seat",
    "collective.nccl.algorithm",
    "collective.nccl.cuda",
    "ps",
    "ps.run",
    "ps.store.step_state",
    "ps.coordinator.servicer",
    "ps.client.client",
    "ps.command_flags",
    "common",
    "common.commit.folder",
    "common.commit.writer",
    "common.network.rendezvous",
    "common.launch.job",
    "common.launch.flags",
    "common.trainer.data",
    "common.trainer.entry",
    "common.sync.local",
    "common.sync.overlap",
    "common.system.process",
    "common.launch.cli",
    "common.tensors.optimizers",
    "common.network.rpc",
    "common.system.addresses",
    "common.launch.hosts",
    "common.sync.trace",
    "common.launch.trace_file",
    "common.launch.tracing",
    "common.trainer.timeline",
)


def modules() -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse((ROOT / module).read_text(), module)


def imported(nodes: Iterator[ast.AST]) -> Iterator[str]:
    """The first part of every imported module's name; "." for a relative import."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." if node.level else (node.module or "").partition(".")[0]


def everywhere(module: str) -> set[str]:
    return set(imported(ast.walk(tree_of(module))))


def at_the_top(module: str) -> set[str]:
    """What importing the module imports: all that is not inside a function."""

    def outside(node: ast.AST) -> Iterator[ast.AST]:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                yield child
                yield from outside(child)

    return set(imported(outside(tree_of(module))))


def test_the_walk_finds_the_packages() -> None:
    found = modules()
    assert len(found) > 40
    assert PADDLE_AT_THE_TOP - {"ps/optimizer.py"} <= set(found)
    assert "common" in everywhere("ps/store/store.py")


def test_imports_point_one_way() -> None:
    wrong = {m: everywhere(m) & set(PACKAGES) - MAY_IMPORT[m.partition("/")[0]] for m in modules()}
    assert {m: packages for m, packages in wrong.items() if packages} == {}


def test_no_relative_import_hides_where_a_name_comes_from() -> None:
    assert [m for m in modules() if "." in everywhere(m)] == []


def test_paddle_is_imported_in_few_places() -> None:
    ours = [m for m in modules() if not m.startswith("benchmarks/contestants/")]
    assert {m for m in ours if "paddle" in at_the_top(m)} <= PADDLE_AT_THE_TOP
    assert {m for m in ours if "paddle" in everywhere(m)} <= PADDLE_IN_FUNCTIONS


def test_every_module_opens_with_a_sentence() -> None:
    opening = {m: (ast.get_docstring(tree_of(m)) or "").split("\n\n")[0].strip() for m in written()}
    assert {m: first for m, first in opening.items() if not first.endswith((".", ":"))} == {}


def test_every_module_lists_what_it_exports() -> None:
    for module in written():
        if not module.endswith("__main__.py"):
            names = exported(module)
            assert names is not None, f"{module} has no __all__"
            assert len(set(names)) == len(names), module
            assert set(names) <= defined(module), module


def written() -> list[str]:
    """The modules that no tool has written."""
    return [m for m in modules() if not m.endswith(GENERATED)]


def exported(module: str) -> list[str] | None:
    """The names written out in `__all__`; None without one."""
    for node in tree_of(module).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and target.id == "__all__":
            return [item.value for item in node.value.elts if isinstance(item, ast.Constant)]
    return None


def defined(module: str) -> set[str]:
    """The names that a module binds."""
    names: set[str] = set()
    for node in ast.walk(tree_of(module)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


@pytest.mark.processes
def test_the_core_does_not_load_paddle() -> None:
    code = (
        "import importlib, sys\n"
        f"for name in {PADDLE_FREE!r}:\n"
        "    importlib.import_module(name)\n"
        "    assert 'paddle' not in sys.modules, name\n"
        "print('free')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "free\n"), done.stderr


@pytest.mark.processes
@pytest.mark.parametrize(
    "first", ["common.system.process", "collective", "ps", "common.network.rendezvous", "common.launch.job"]
)
def test_each_can_be_imported_first(first: str) -> None:
    code = f"import {first}, sys; print('paddle' in sys.modules, 'grpc' in sys.modules, 'tyro' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert done.stdout.split()[0] == "False"


@pytest.mark.processes
@pytest.mark.parametrize("first", ["common", "collective", "ps", "ps.run", "ps.client.client"])
@pytest.mark.parametrize(("said", "expected"), [({}, "NONE"), ({"GRPC_VERBOSITY": "DEBUG"}, "DEBUG")])
def test_grpc_is_told_to_be_silent_before_it_is_imported(first: str, said: dict[str, str], expected: str) -> None:
    code = (
        "import os, sys\n"
        "class Watch:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'grpc': print(os.environ.get('GRPC_VERBOSITY'))\n"
        "sys.meta_path.insert(0, Watch())\n"
        f"import {first}, grpc"
    )
    environment = {key: value for key, value in os.environ.items() if key != "GRPC_VERBOSITY"} | said
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, env=environment
    )
    assert (done.stdout, done.stderr) == (f"{expected}\n", "")
