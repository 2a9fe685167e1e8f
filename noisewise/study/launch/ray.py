"""Tasks of a Ray cluster that shares a file system with this machine, or of a Ray started here for the purpose."""

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from noisewise.study.job import Job, Launcher, explained, record_failure
from noisewise.training.signals import StopRequest

LISTEN = 0.2  # seconds between two looks at whether to stop


@dataclass(frozen=True)
class Ray(Launcher):
    """Each job as a task.

    Args:
        address: of a cluster; None starts one on this machine.
        cpus: for each run.
        gpus: for each run; None is 1 if the cluster has any.
    """

    address: str | None = None
    cpus: float = 1
    gpus: float | None = None

    options = ("ray", "ray_cpus", "ray_gpus")

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--ray", metavar="ADDRESS", help='ray: the cluster, such as "auto"; default: one on this machine')
        parser.add_argument("--ray-cpus", type=float, help="ray: cores for each run; default: 1")
        parser.add_argument("--ray-gpus", type=float, help="ray: GPUs for each run; default: 1 if there are any")

    @classmethod
    def from_options(cls, options: argparse.Namespace, folder: Path, samplers: int) -> "Ray":
        cls.package("ray", "ray")
        return cls(options.ray, 1 if options.ray_cpus is None else options.ray_cpus, options.ray_gpus)

    def launch(self, jobs: Sequence[Job], stop: StopRequest) -> None:
        ray = self.package("ray", "ray")
        begun_here = not ray.is_initialized()
        if begun_here:
            ray.init(address=self.address or "local", include_dashboard=False, log_to_driver=False, logging_level="warning")
        try:
            gpus = min(1, ray.cluster_resources().get("GPU", 0)) if self.gpus is None else self.gpus
            # a run that fails says so itself: only what Ray loses is an error, and the same command tries that again
            task = ray.remote(num_cpus=self.cpus, num_gpus=gpus, max_retries=0)(work_in)
            self._follow(ray, {task.remote(str(Path.cwd()), job): job for job in jobs}, stop)
        finally:
            if begun_here:
                ray.shutdown()

    def _follow(self, ray: Any, tasks: dict[Any, Job], stop: StopRequest) -> None:
        cancelled = False
        while tasks:
            done, _ = ray.wait(list(tasks), timeout=LISTEN)
            for task in done:
                self._note(ray, task, tasks.pop(task), stop)
            if stop.requested and not cancelled:
                cancelled = True
                for task in tasks:
                    ray.cancel(task, force=False)  # an interrupt, to which a run answers by saving

    def _note(self, ray: Any, task: Any, job: Job, stop: StopRequest) -> None:
        """Leave in the run's folder what it could not say itself."""
        try:
            end = ray.get(task)
        except ray.exceptions.RayError as error:
            if not stop.requested:
                record_failure(job, f"Ray lost it: {explained(error)}")
        else:
            if end == "stopped" and not stop.requested:
                record_failure(job, "it was told to stop by a signal, and is saved")


def work_in(folder: str, job: Job) -> str:
    """Do a job where the command was started: paths may be relative."""
    from noisewise.study.worker import work_alone  # only the task needs what trains and measures

    os.chdir(folder)
    return work_alone(job)
