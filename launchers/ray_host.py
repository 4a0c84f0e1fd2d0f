"""Processes of a run on the nodes of a Ray cluster.

Ray finds the nodes and keeps the resources; an actor (`Member`) on each place starts the very process that a local run
would, answers for it, and takes it along when it dies. The buffer is beside the supervisor. The run's folder has to be
on a file system that all nodes share: logs, metrics and checkpoints land there. Tokens and weights go over ZeroMQ.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

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
PATIENCE_S = 20.0
"""Time without a place after which the user is told."""
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
    if weights.transport == "auto" and (nodes > 1 or config.launch.ray_address is not None):  # others may join
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

    def __init__(self) -> None:
        self._process: LocalProcess | None = None

    def where(self) -> Where:
        context = ray.get_runtime_context()
        gpus = [str(number) for number in context.get_accelerator_ids().get("GPU", [])]
        return Where(context.get_node_id(), ray.util.get_node_ip_address(), sorted(os.sched_getaffinity(0)), gpus)

    def start(self, spec: Spec, directory: str) -> str:
        """The process's identity; asked twice, it starts one. `directory`: where the run was started, whose modules it
        may use."""
        if self._process is None:
            address = ray.util.get_node_ip_address()
            if not (spec.folder / "config.yaml").is_file():
                raise LaunchError(
                    f"the run's folder {spec.folder} cannot be seen on {address}: set `folder` to one on a file system "
                    "that all nodes share"
                )
            with contextlib.suppress(OSError):
                os.chdir(directory)
            self._process = LocalProcess(spec, address)
        return self._process.identity

    def poll(self) -> int | None:
        return self._started.poll()

    def signal(self, number: int) -> None:
        self._started.signal(signal.Signals(number))

    def kill(self) -> None:
        self._started.kill()

    def prepare_end(self) -> None:
        self._started.prepare_end()

    def finish(self, timeout_s: float) -> None:
        self._started.finish(timeout_s)

    @property
    def _started(self) -> LocalProcess:
        assert self._process is not None
        return self._process


class RayProcess:
    """The supervisor's side of a `Member`, which first has to find its place: nobody waits for that, `poll` goes on
    from where it was. A node that does not answer is not dead before Ray says so."""

    def __init__(self, name: str, actor: Any, placed: Callable[[Where], Spec], limit_s: float | None) -> None:
        """`placed`: what to start at a place. `limit_s`: longest time until there is one; None waits for ever."""
        self.identity = ""
        self._name, self._actor, self._placed, self._limit_s = name, actor, placed, limit_s
        self._stage: Literal["place", "start", "run"] = "place"
        self._asked: Any = actor.where.remote()
        self._begun = time.monotonic()
        self._said = self._unheard = False
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None and ray.wait([self._asked], timeout=0)[0]:
            self._heard()
        elif self._code is None and self._stage == "place":
            self._wait(time.monotonic() - self._begun)
        return self._code

    def _heard(self) -> None:
        try:
            answer = ray.get(self._asked)
        except ActorUnavailableError:
            answer = None
        except RayActorError:
            self._code = -signal.SIGKILL
            return
        except RayError as error:
            cause = getattr(error, "cause", None)
            raise cause if isinstance(cause, LaunchError) else LaunchError(f"{self._name}: {error}") from error
        self._unheard = False
        if self._stage == "place" and answer is not None:
            self._stage, self._spec = "start", self._placed(answer)
        elif self._stage == "start" and answer is not None:
            self._stage, self.identity = "run", answer
        elif self._stage == "run":
            self._code = answer
        self._ask()

    def _ask(self) -> None:
        match self._stage:
            case "place":
                self._asked = self._actor.where.remote()
            case "start":
                self._asked = self._actor.start.remote(self._spec, os.getcwd())
            case "run":
                self._asked = self._actor.poll.remote()

    def _wait(self, waited_s: float) -> None:
        if self._limit_s is not None and waited_s > self._limit_s:
            raise StartTimeout(f"Ray had no place for {self._name} within launch.startup_s = {self._limit_s:g} s")
        if waited_s > PATIENCE_S and not self._said:
            self._said = True
            print(f"{self._name} waits for a place on Ray; free now: {ray.available_resources()}", file=sys.stderr)

    def signal(self, sig: signal.Signals) -> None:
        if self._stage == "run":
            self._actor.signal.remote(int(sig))
        else:
            self.kill()

    def kill(self) -> None:
        if self._stage == "run":
            self._tell(self._actor.kill.remote())
        else:
            ray.kill(self._actor)
            self._code = -signal.SIGKILL

    def prepare_end(self) -> None:
        if self._stage == "run":
            self._actor.prepare_end.remote()

    def finish(self, timeout_s: float) -> None:
        if self._stage == "run":
            self._tell(self._actor.finish.remote(timeout_s), timeout_s)

    def _tell(self, answer: Any, timeout_s: float = 0.0) -> None:
        """Waits for it to be done, but not again for a node that has not answered. What cannot be told to a dead actor
        does not matter: its process is dead too."""
        try:
            ray.get(answer, timeout=timeout_s + (0.1 if self._unheard else ANSWER_S))
        except GetTimeoutError:
            self._unheard = True
        except RayError as error:
            print(f"{self._name}: {error}", file=sys.stderr)


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
        spec = replace(spec, folder=spec.folder.resolve())
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

        def placed(where: Where) -> Spec:
            return replace(spec, place=self._place(spec.name, where, int(bundle["CPU"])))

        # Without one more worker the others go on; without a rank nobody does.
        return RayProcess(spec.name, actor, placed, None if spec.role == "worker" else self._launch.startup_s)

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
        group, _ = self._groups.get(name, (None, 0))
        if group is not None and group.bundle_count == 1:
            remove_placement_group(group)
            del self._groups[name]

    def close(self) -> None:
        for name in list(self._actors):
            self._let_go(name)
        ray.shutdown()
