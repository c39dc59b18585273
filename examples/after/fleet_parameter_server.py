"""A dynamic-graph program in the style of Paddle's parameter-server API, which Paddle 3 no longer has.

Every process runs it; a launcher says which are servers: python -m paddle.distributed.launch --run_mode=ps
--server_num 1 --trainer_num 2 fleet_parameter_server.py
"""

import argparse

import numpy as np
import paddle
from paddle import nn
import ps as fleet


def make_batch(random):
    """A line to be found: y = 3 a - 2 b + 1, with noise."""
    x = random.random((32, 2), np.float32)
    y = x @ np.array([[3.0], [-2.0]], np.float32) + 1 + 0.01 * random.standard_normal((32, 1), np.float32)
    return paddle.to_tensor(x), paddle.to_tensor(y)


def work(args):
    fleet.init_worker()
    paddle.seed(1)
    model = fleet.distributed_model(nn.Linear(2, 1))
    optimizer = fleet.distributed_optimizer(paddle.optimizer.SGD(0.5, parameters=model.parameters()))
    random = np.random.default_rng(fleet.worker_index())
    for step in range(args.steps):
        x, y = make_batch(random)
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        if step % 50 == 0 and fleet.is_first_worker():
            print(f"step {step} loss {float(loss):.5f}", flush=True)
    if fleet.is_first_worker():
        weight, bias = (p.numpy().ravel().round(2).tolist() for p in model.parameters())
        print(f"found weight {weight} bias {bias}", flush=True)
        paddle.save(model.state_dict(), args.save)
    fleet.stop_worker()


def main(args):
    role = fleet.PaddleCloudRoleMaker(is_collective=False)
    fleet.init(role)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
    else:
        work(args)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save", default="line.pdparams")
    main(parser.parse_args())
