#!/usr/bin/env bash
# What a GPU host is asked once: are the NCCL paths right, and how fast are they? Usage: tests/gpu/check.sh OUT_FOLDER
# Needs the packages listed in docs/gpu.md, no internet. Ends with the tests' exit code, else the sweep's.
set -uo pipefail
cd "$(dirname "$0")/../.."
out=${1:?usage: tests/gpu/check.sh OUT_FOLDER}
mkdir -p "$out"
python=${PYTHON:-python3}
export PYTHONUNBUFFERED=1 GRADSYNC_TEST_DEADLINE_S=${GRADSYNC_TEST_DEADLINE_S:-100}

if ! "$python" -c 'from collective.nccl.seat import require_nccl; require_nccl("cupy")'; then
  echo "nothing to check: this host lacks CuPy, NCCL or a GPU" >&2
  exit 2
fi

{
  nvidia-smi
  "$python" -c 'from benchmarks.records.environment import describe_environment; import msgspec; print(msgspec.json.format(msgspec.json.encode(describe_environment())).decode())'
} 2>&1 | tee "$out/environment.txt"

timeout "${TESTS_S:-330}" "$python" -m pytest -m gpu tests/gpu -rA -q --durations=10 2>&1 | tee "$out/tests.txt"
tests=$?

timeout "${SWEEP_S:-200}" "$python" -m benchmarks sweep --nranks "${NRANKS:-2,4}" --repetitions 5 \
  --backends nccl-raw,nccl,nccl-ring,torch-nccl --sizes 64KiB,1MB,16MB,100MB,400MB --out "$out/sweep" 2>&1 |
  tee "$out/sweep.txt"
sweep=$?
[ $tests -ne 0 ] && exit $tests
exit $sweep
