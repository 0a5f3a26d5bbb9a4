"""A plain torchrun script that knows nothing of clusterrun."""

import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
print(f"rank {dist.get_rank()} of {dist.get_world_size()} sum {total.item():.0f} args {sys.argv[1:]}")
dist.destroy_process_group()
