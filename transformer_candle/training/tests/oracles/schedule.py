"""Prints the learning rates of PyTorch's own schedulers: `python schedule.py > schedule.txt`.

Columns: strategy, warm-up steps, total steps, step (from 1), learning rate. Peak 3e-4, minimum 3e-5.
"""

import warnings

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

PEAK, MIN = 3e-4, 3e-5
warnings.filterwarnings("ignore")


def rates(strategy: str, warmup: int, total: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    start = max(warmup, 1)
    if strategy == "cosine":
        decay = CosineAnnealingLR(optimizer, T_max=total - start, eta_min=MIN)
    else:
        decay = LinearLR(optimizer, 1.0, MIN / PEAK, total_iters=total - start)
    schedule = decay
    if warmup > 1:
        rise = LinearLR(optimizer, 1 / warmup, 1.0, total_iters=warmup - 1)
        schedule = SequentialLR(optimizer, [rise, decay], milestones=[warmup - 1])
    values = []
    for _ in range(total):
        values.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return values


print("# strategy warmup total step rate; made by schedule.py with torch", torch.__version__)
for strategy in ("cosine", "linear"):
    for warmup, total in ((0, 7), (1, 9), (4, 20)):
        for step, rate in enumerate(rates(strategy, warmup, total), start=1):
            print(strategy, warmup, total, step, repr(rate))
