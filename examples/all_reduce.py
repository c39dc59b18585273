"""Every rank's numbers, averaged over all ranks: python -m collective.run --nranks 4 examples/all_reduce.py"""

import os
import sys

import collective

if "GRADSYNC_RENDEZVOUS" not in os.environ:
    sys.exit("start it with a launcher: python -m collective.run --nranks 4 examples/all_reduce.py")
rank, nranks = int(os.environ["PADDLE_TRAINER_ID"]), int(os.environ["PADDLE_TRAINERS_NUM"])  # set by the launcher
with collective.connect(rank, nranks, os.environ["GRADSYNC_RENDEZVOUS"]) as group:
    array = group.empty(1_000_000)  # float32, in memory that all ranks reach
    array[:] = rank
    group.all_reduce(array, op="mean")
    print(f"rank {rank} of {nranks}: the mean is {array[0]}")
