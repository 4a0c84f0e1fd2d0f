"""Processes of a run on the nodes of a Ray cluster.

Ray finds the nodes and keeps the resources; an actor (`Member`) on each place starts the very process that a local run
would, answers for it, and takes it along when it dies. The buffer is beside the supervisor. The run's folder has to be
on a file system that all nodes share: logs, metrics and checkpoints land there. Tokens and weights go over ZeroMQ.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError
from ray.util import placement_group, remove_placement_group
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from async_rl.config import Config, LaunchConfig
from async_rl.errors import ConfigError
from buffers import keys
from buffers.config import SecurityConfig
from launchers import devices
from launchers.devices import Place
from launchers.errors import LaunchError, StartTimeout
from launchers.hosts import Handle, LocalProcess, Spec

POOLS = {"worker": "rollout", "learner": "learner"}
"""Roles that Ray places; the others are beside the supervisor."""
ANSWER_S = 10.0
"""Longest wait for an actor's answer to a command; a node that cannot be reached may come back later."""
Resources = dict[str, float]


def request(role: str, launch: LaunchConfig, *, gpus: bool, tensor_parallel: int = 1) -> Resources:
    """What Ray is asked for, for one member of a role's pool."""
    each = float(tensor_parallel) if role == "worker" else 1.0
    if role == "worker":
        cpus, asked, more = launch.worker_cpus, launch.worker_gpus, launch.worker_resources
    else:
        cpus, asked, more = launch.rank_cpus, launch.rank_gpus, launch.rank_resources
    gpu = (each if gpus and launch.device != "cpu" else 0.0) if asked is None else asked
    if launch.device == "cuda" and asked is None:
        gpu = each
    return {"CPU": float(cpus), **({"GPU": gpu} if gpu else {}), **more}


def missing(asked: list[Resources], have: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """Resources of which more is asked for than there is: (asked for, there)."""
    names = sorted({name for each in asked for name in each})
    totals = {name: sum(each.get(name, 0.0) for each in asked) for name in names}
    return {name: (total, have.get(name, 0.0)) for name, total in totals.items() if total > have.get(name, 0.0)}


def configured(config: Config, folder: Path, *, nodes: int) -> Config:
    """The configuration as processes on several hosts need it: addresses of their hosts, keys, weights that travel."""
    security, weights = config.buffer.security, config.weights
    if security.keys is None:
        if not (folder / "keys").exists():
            keys.make(folder / "keys")
        security = msgspec.structs.replace(security, keys=str((folder / "keys").resolve()))
    if security.bind == SecurityConfig().bind:
        security = msgspec.structs.replace(security, bind="tcp://{host}:*")
    if weights.transport == "auto" and nodes > 1:
        weights = msgspec.structs.replace(weights, transport="zmq")
    buffer = msgspec.structs.replace(config.buffer, security=security)
    return msgspec.structs.replace(config, buffer=buffer, weights=weights)


class Where(NamedTuple):
    """An actor's node: its address, the cores and GPUs that the actor may use."""

    node: str
    address: str
    cores: list[int]
    gpus: list[str]


class Member:
    """On the node: one process of a run. The actor's death is that of the process."""

    def where(self) -> Where:
        context = ray.get_runtime_context()
        gpus = [str(number) for number in context.get_accelerator_ids().get("GPU", [])]
        return Where(context.get_node_id(), ray.util.get_node_ip_address(), sorted(os.sched_getaffinity(0)), gpus)

    def start(self, spec: Spec, folder: str, directory: str) -> str:
        """The process's identity. `directory`: where the run was started, whose modules it may use."""
        if not Path(folder, "config.yaml").is_file():
            raise LaunchError(
                f"the run's folder {folder} cannot be seen on {ray.util.get_node_ip_address()}: set `folder` to one on "
                "a file system that all nodes share"
            )
        with contextlib.suppress(OSError):
            os.chdir(directory)
        self._process = LocalProcess(spec, ray.util.get_node_ip_address())
        return self._process.identity

    def poll(self) -> int | None:
        return self._process.poll()

    def signal(self, number: int) -> None:
        self._process.signal(signal.Signals(number))

    def kill(self) -> None:
        self._process.kill()

    def prepare_end(self) -> None:
        self._process.prepare_end()

    def finish(self, timeout_s: float) -> None:
        self._process.finish(timeout_s)


class RayProcess:
    """The supervisor's side of a `Member`. A node that does not answer is not dead before Ray says so."""

    def __init__(self, actor: Any, identity: str) -> None:
        self.actor, self.identity = actor, identity
        self._asked: Any = None

    def poll(self) -> int | None:
        if self._asked is None:
            self._asked = self.actor.poll.remote()
        ready, _ = ray.wait([self._asked], timeout=0)
        if not ready:
            return None
        asked, self._asked = self._asked, None
        try:
            return ray.get(asked)
        except ActorUnavailableError:
            return None
        except RayActorError:
            return -signal.SIGKILL

    def signal(self, sig: signal.Signals) -> None:
        self._tell(self.actor.signal.remote(int(sig)))

    def kill(self) -> None:
        self._tell(self.actor.kill.remote())

    def prepare_end(self) -> None:
        self._tell(self.actor.prepare_end.remote())

    def finish(self, timeout_s: float) -> None:
        self._tell(self.actor.finish.remote(timeout_s), timeout_s + ANSWER_S)

    def _tell(self, answer: Any, timeout_s: float = ANSWER_S) -> None:
        """What cannot be told to a dead actor does not matter: its process is dead too."""
        with contextlib.suppress(RayActorError, GetTimeoutError):
            ray.get(answer, timeout=timeout_s)


class RayHost:
    """A Ray cluster: a new one on this machine, or that of `launch.ray_address`."""

    def __init__(self, config: Config) -> None:
        self._config, self._launch = config, config.launch
        try:
            # Only a cluster of its own is told what to have.
            ray.init(
                address=self._launch.ray_address,
                runtime_env=self._launch.runtime_env or None,
                include_dashboard=False if self._launch.ray_address is None else None,
                log_to_driver=False,
                logging_level="warning",
            )
        except (RayError, ConnectionError, RuntimeError, ValueError) as error:
            raise LaunchError(f"Ray at {self._launch.ray_address or 'this machine'} cannot be used: {error}") from error
        self._address = ray.util.get_node_ip_address()
        self._gpus = ray.cluster_resources().get("GPU", 0.0)
        self._groups: dict[str, tuple[PlacementGroup, int]] = {}
        """By name of a process: where in which placement group its place is."""
        self._actors: dict[str, Any] = {}
        self._cores: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._reserve()

    def configured(self, config: Config, folder: Path) -> Config:
        alive = sum(node["Alive"] for node in ray.nodes())
        return configured(config, folder, nodes=alive)

    def _request(self, role: str) -> Resources:
        return request(role, self._launch, gpus=self._gpus > 0, tensor_parallel=self._config.rollout.tensor_parallel)

    def _reserve(self) -> None:
        """Both pools at once, or an error that says what was asked for and what there is."""
        devices.check_kinds(self._config, int(self._gpus))
        sizes = {"worker": self._config.rollout.workers, "learner": self._config.learner.ranks}
        asked = {role: [self._request(role)] * count for role, count in sizes.items()}
        short = missing([each for pool in asked.values() for each in pool], ray.cluster_resources())
        if short:
            free = ray.available_resources()
            what = ", ".join(
                f"{total:g} {name} (the cluster has {have:g}, {free.get(name, 0.0):g} of them free)"
                for name, (total, have) in short.items()
            )
            raise ConfigError(
                "launch", f"{sizes['worker']} rollout workers, {sizes['learner']} learner ranks",
                f"they ask for {what}",
                "Use fewer, ask for less of each (launch.worker_cpus, .rank_cpus, .worker_gpus, .rank_gpus), or add "
                "nodes",
            )  # fmt: skip
        for role, bundles in asked.items():
            group = placement_group(bundles, strategy="PACK", name=POOLS[role])
            for index in range(len(bundles)):
                self._groups[f"{role}{index}"] = group, index
        for group in {id(group): group for group, _ in self._groups.values()}.values():
            if not group.wait(self._launch.startup_s):
                raise StartTimeout(
                    f"Ray gave no place to the {group.bundle_specs} within launch.startup_s = "
                    f"{self._launch.startup_s:g} s; free now: {ray.available_resources()}"
                )

    def start(self, spec: Spec) -> Handle:
        """In a place of its pool, which a later member gets when it comes."""
        if spec.role not in POOLS:
            return LocalProcess(spec, self._address)
        self._let_go(spec.name)
        if spec.name not in self._groups:
            group = placement_group([self._request(spec.role)], name=f"{POOLS[spec.role]}-{spec.name}")
            self._groups[spec.name] = group, 0
        group, index = self._groups[spec.name]
        bundle = group.bundle_specs[index]
        place = PlacementGroupSchedulingStrategy(group, index, placement_group_capture_child_tasks=False)
        others = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU")}
        actor = (
            ray.remote(Member)
            .options(
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0),
                resources=others or None,
                scheduling_strategy=place,
            )
            .remote()
        )
        self._actors[spec.name] = actor
        try:
            where: Where = ray.get(actor.where.remote(), timeout=self._launch.startup_s)
            spec = replace(spec, place=self._place(spec.name, where, int(bundle["CPU"])))
            identity = ray.get(actor.start.remote(spec, str(spec.folder), os.getcwd()), timeout=ANSWER_S)
        except GetTimeoutError as error:
            raise StartTimeout(f"Ray has no place for {spec.name}: {bundle} were not free in time") from error
        except RayError as error:
            cause = getattr(error, "cause", None)
            raise cause if isinstance(cause, LaunchError) else LaunchError(f"{spec.name}: {error}") from error
        return RayProcess(actor, identity)

    def _place(self, name: str, where: Where, count: int) -> Place:
        """GPUs as Ray gives them; without one, cores of its own, as far as the node has them."""
        if where.gpus or not self._launch.pin_cores:
            return Place(gpus=tuple(where.gpus))
        taken = [core for node, cores in self._cores.values() if node == where.node for core in cores]
        free = [core for core in where.cores if core not in taken] or where.cores
        self._cores[name] = where.node, tuple(free[: max(1, count)])
        return Place(self._cores[name][1])

    def _let_go(self, name: str) -> None:
        actor = self._actors.pop(name, None)
        if actor is not None:
            ray.kill(actor)
        self._cores.pop(name, None)

    def most_workers(self) -> int | None:
        return None  # one that finds no place waits for it

    def release(self, name: str) -> None:
        """Nobody of this name is wanted any more: its place is for others. One of a pool's first places stays."""
        self._let_go(name)
        group, _ = self._groups[name]
        if group.bundle_count == 1:
            remove_placement_group(group)
            del self._groups[name]

    def close(self) -> None:
        for name in list(self._actors):
            self._let_go(name)
        ray.shutdown()
