"""A sweeper that chooses its points by results, as Optuna's does: it halves the learning rate while the loss is worse
than the best, and doubles it while it gets better. Written against Hydra's plugin interface alone.

    hydra.sweeper._target_=hydra_plugins.halving_sweeper.HalvingSweeper +hydra.sweeper.batches=3
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf


class HalvingSweeper(Sweeper):
    def __init__(self, batches: int, **ignored: Any) -> None:
        self.batches = batches

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra_context, self.config = hydra_context, config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        rates, results, number = [0.4, 0.2], {}, 0
        for _ in range(self.batches):
            batch = [(*arguments, f"train.lr={rate:g}") for rate in rates]
            self.validate_batch_is_legal(batch)
            returns = self.launcher.launch(batch, initial_job_idx=number)
            results.update({rate: float(r.return_value) for rate, r in zip(rates, returns, strict=True)})
            number += len(batch)
            best = min(results, key=lambda rate: results[rate])
            rates = [best / 2, best * 2]
        best = min(results, key=lambda rate: results[rate])
        found = {"best": best, "results": {str(rate): loss for rate, loss in results.items()}}
        OmegaConf.save(OmegaConf.create(found), Path(self.config.hydra.sweep.dir) / "optimization_results.yaml")
