"""How gradients travel: compression and bucket size of a real run take effect, told from its weights and buckets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from support import clusterrun, events, final_state

MODEL = ["train=ddp_mlp", "train.task_args={hidden: 512, depth: 2}", "train.max_steps=4", "train.momentum=1e-30"]


def first_gradients(tmp_path: Path, run: str) -> dict[str, Any]:
    """With next to no momentum, and no weight decay, the momentum is the last gradient, averaged over ranks."""
    state = {k: v for k, v in final_state(tmp_path, run).items() if k.endswith("momentum_buffer")}
    assert len(state) == 6
    return state


def test_compression_and_bucket_size(tmp_path: Path) -> None:
    for run, options in (
        ("plain", []),
        ("packed", ["train.grad_compression=fp16", "train.bucket_mb=0.01"]),
    ):
        code, said = clusterrun(tmp_path, *MODEL, *options, f"run_id={run}")
        assert code == 0, said
    plain, packed = first_gradients(tmp_path, "plain"), first_gradients(tmp_path, "packed")

    def fits_fp16(value: torch.Tensor) -> bool:
        return float((value.half().float() - value).abs().max()) < 1e-20

    assert all(fits_fp16(value) for value in packed.values())
    assert not any(fits_fp16(value) for value in plain.values() if value.numel() > 1000)
    for name, value in plain.items():  # the same but for the digits that fp16 lacks
        assert torch.allclose(value, packed[name], atol=2e-4, rtol=5e-3), name
    (one,), (other,) = (events(tmp_path, run, "buckets") for run in ("plain", "packed"))
    gradients = 4 * (785 * 512 + 513 * 512 + 513 * 10)
    assert sum(one["bytes"]) == sum(other["bytes"]) == gradients
    assert len(one["bytes"]) == 2  # 1 MiB first, then the rest
    assert len(other["bytes"]) == 3  # one per layer
    assert [events(tmp_path, run, "start")[0]["grad_compression"] for run in ("plain", "packed")] == ["none", "fp16"]
