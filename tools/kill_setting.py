"""The parameters of a run of ``kill_tests``."""

from __future__ import annotations

import dataclasses
import signal
from typing import Literal

from backhaul._options import Options
from tools.triggers import STAGES

RANDOM = "at a random time"


@dataclasses.dataclass(frozen=True)
class KillSetting:
    """The parameters of one run.

    Attributes:
        count: How many workers are killed.
        workers: The number of processes besides the driver's.
        seed: Determines programs, victims and times.
        how: SIGKILL or SIGSTOP. A stopped worker is continued later.
        stages: The names of the stages; see ``triggers``.
        limit: Seconds in which a step must end.
        notice: How a stopped worker is noticed: by missing heartbeats (``heartbeat``), or by timeouts of calls only.
        references: Whether references that were lost with a worker must be dropped.
        left_by_lost: Whether contexts of a killed driver must be released. See ``simulation.run.Checks``.
        settle_seconds: After this time nothing may be left.
        transport: The transport of the workers.
    """

    count: int = 40
    workers: int = 4
    seed: int = 0
    how: signal.Signals = signal.SIGKILL
    stages: tuple[str, ...] = (*(stage.name for stage in STAGES), RANDOM)
    limit: float = 60.0
    notice: str = "timeout"
    references: bool = True
    left_by_lost: bool = False
    settle_seconds: float = 20.0
    transport: Literal["auto", "tcp"] = "auto"

    def options(self) -> Options:
        """The options of the workers. Where a closed channel must end a step, all timeouts are too long to do it."""
        times: dict[str, float] = {"timeout": 40.0, "backward_timeout": 50.0}
        if self.how == signal.SIGSTOP and self.notice == "heartbeat":
            times |= {"heartbeat_interval": 0.2, "suspect_after": 0.6, "lost_after": 1.5}
        elif self.how == signal.SIGSTOP:
            times = {"timeout": 1.5, "backward_timeout": 3.0, "connect_timeout": 1.5}
        return Options(transport=self.transport, **times)  # type: ignore[arg-type]
