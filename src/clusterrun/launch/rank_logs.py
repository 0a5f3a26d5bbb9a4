"""Where torchrun puts the output of each rank: one file per rank and stream in the attempt's directory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs

from clusterrun.rundir import AttemptDir

if TYPE_CHECKING:
    from clusterrun.launch.agent import StopForwarder


class RankLogs(LogsSpecs):
    """torch asks this right before it starts or restarts the workers of a node."""

    def __init__(self, attempt: AttemptDir, node: str, stop: StopForwarder, *, nccl: bool = False) -> None:
        super().__init__(log_dir=str(attempt.logs))
        self._attempt = attempt
        self._node = node
        self._stop = stop
        self._nccl = nccl  # give each rank a file for NCCL's lines

    @property
    def root_log_dir(self) -> str:
        return str(self._attempt.logs)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        if self._stop.requested:
            from clusterrun.launch.agent import StoppedBeforeStartError

            raise StoppedBeforeStartError
        destination = LogsDest()
        for local_rank, env in envs.items():
            rank, restart = int(env["RANK"]), int(env["TORCHELASTIC_RESTART_COUNT"])
            destination.stdouts[local_rank] = str(self._attempt.log(self._node, rank, restart, "out"))
            destination.stderrs[local_rank] = str(self._attempt.log(self._node, rank, restart, "err"))
            errors = str(self._attempt.error_file(self._node, rank, restart))
            destination.error_files[local_rank] = errors
            env["TORCHELASTIC_ERROR_FILE"] = errors
            if self._nccl:  # NCCL reads % as the start of a placeholder
                file = self._attempt.nccl_log(self._node, rank, restart)
                env["NCCL_DEBUG_FILE"] = str(file).replace("%", "%%")
        return destination
