"""A training script of a user's own, with clusterrun's checkpoints: own_loop.py STEPS DELAY_S ANSWER [DIRECTORY]."""

import hashlib
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import clusterrun

steps, delay, answer = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(20, 50), nn.BatchNorm1d(50), nn.ReLU(), nn.Dropout(0.2), nn.Linear(50, 3))
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
torch.manual_seed(1 + rank)
told = {name: value for name, value in os.environ.items() if name.startswith("CLUSTERRUN_")}
print(f"contract {sorted(told)} grace {told.get('CLUSTERRUN_GRACE_S')}", flush=True)
outside = {"directory": sys.argv[4], "every_steps": 10} if len(sys.argv) > 4 else {}
checkpoints = clusterrun.CheckpointManager(model, optimizer, extra={"schedule": schedule}, **outside)
for step in checkpoints.steps(steps):
    data = torch.Generator().manual_seed(1000 * step + rank)
    inputs, labels = torch.randn(16, 20, generator=data), torch.randint(3, (16,), generator=data)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs), labels).backward()
    optimizer.step()
    schedule.step()
    if rank == 0:
        print(f"did step {step}", flush=True)
    time.sleep(delay)
if rank == 0 and not checkpoints.stopped:
    state = [value.numpy().tobytes() for value in net.state_dict().values()]
    digest = hashlib.sha256(b"".join(state)).hexdigest()
    with open(answer, "w") as out:
        out.write(f"{digest} {optimizer.param_groups[0]['lr']!r} {torch.rand(1).item()!r}")
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # an ordinary exit of torch 2.13 after DDP with Gloo aborts now and then
