"""Workers: where independent tasks run."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral

from critical_neurons.errors import InvalidSettingError


@dataclass(frozen=True)
class Workers:
    """`jobs` processes of this machine, or all workers of the Dask cluster with this `scheduler` address.

    One job is this process itself. Every task runs on a fixed number of threads, one by default, so that results are
    identical for any number of workers on the same kind of processor.

    >>> workers = cn.Workers(jobs=4)
    >>> every_class = cn.ByClass(workers=workers)
    >>> cluster = cn.Workers(scheduler="tcp://host:8786")
    """

    jobs: int = 1
    scheduler: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.jobs, bool) or not isinstance(self.jobs, Integral) or self.jobs < 1:
            raise InvalidSettingError(f"jobs: found {self.jobs!r}. Accepted: a whole number of at least one.")
        object.__setattr__(self, "jobs", int(self.jobs))
        if self.scheduler is None:
            return
        if not isinstance(self.scheduler, str) or not self.scheduler:
            raise InvalidSettingError(
                f"scheduler: found {self.scheduler!r}. Accepted: the address of a Dask scheduler, as "
                "'tcp://host:8786'."
            )
        if self.jobs != 1:
            raise InvalidSettingError(
                f"jobs: found {self.jobs} beside a scheduler, whose workers are all used. Leave out one or the other."
            )


HERE = Workers()
"""This process only."""


def check_workers(workers: object) -> None:
    if not isinstance(workers, Workers):
        raise InvalidSettingError(
            f"workers: found {workers!r}. Accepted: cn.Workers(jobs=4), or cn.Workers(scheduler='tcp://host:8786')."
        )
