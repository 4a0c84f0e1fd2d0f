"""Runs on Ray: a cluster of this machine, and one of two hosts made of network namespaces."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from async_rl.config import Config, parse
from experiments.proof.accounts import each_once
from launchers import pools
from launchers.ray_host import configured, missing, request
from tests.e2e import runs

pytestmark = pytest.mark.e2e
SLOW = {
    "environment.name": "async_rl.environments.emulated:Tool",
    "environment.params": {"latency_s": 0.5, "turns": 3},
    "rollout.max_tokens": 32,
}


def config_of(more: dict[str, object] | None = None) -> Config:
    return parse({"data": {"path": "x"}, **(more or {})})


def of_run(folder: Path, module: str) -> list[psutil.Process]:
    """Processes of a run, wherever in the tree; `start` runs them under Ray's workers."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if module in line and str(folder) in line:
            found.append(process)
    return found


def test_killed_processes_on_ray_are_started_again(tiny_model: Path, tmp_path: Path) -> None:
    overrides = {"steps": 40, "learner.checkpoint_every": 5, **SLOW}
    started = runs.start(runs.config(tiny_model, tmp_path, **overrides), "--launcher", "ray")
    started.until(lambda: started.steps() >= 6)
    folder = started.folder.resolve()
    for module in ("async_rl.rollout.worker", "async_rl.learner.rank"):
        reached = started.steps()
        (victim,) = of_run(folder, module)
        victim.send_signal(signal.SIGKILL)
        started.until(lambda module=module, victim=victim: of_run(folder, module) not in ([], [victim]))
        # More than was in flight.
        started.until(lambda reached=reached: started.steps() >= reached + 5)
    # A worker's actor: its process dies with it.
    (victim,) = of_run(folder, "async_rl.rollout.worker")
    parent = victim.parent()
    assert parent is not None
    parent.send_signal(signal.SIGKILL)
    victim.wait(10)
    code, out = started.wait(200)
    assert code == 0, out
    assert "the learner goes on from step" in out
    result = runs.adds_up(started.folder)
    assert (result.steps, result.lost_workers) == (40, 2)
    assert each_once(started.folder, result.tickets.trained)
    runs.nothing_left(started.folder, started.family)


def test_a_pool_that_finds_no_place_waits_and_holds_nobody_up(tiny_model: Path, tmp_path: Path) -> None:
    started = runs.start(runs.config(tiny_model, tmp_path, steps=14, **SLOW), "--launcher", "ray")
    started.until(lambda: started.steps() >= 2)
    folder = started.folder.resolve()
    pools.ask(folder, (os.cpu_count() or 1) + 2)
    started.until(lambda: started.steps() >= 8)
    assert len(of_run(folder, "async_rl.rollout.worker")) >= 1
    pools.ask(folder, 1)
    code, out = started.wait(200)
    assert code == 0, out
    assert "-> 1" in out
    assert runs.adds_up(started.folder).lost_workers == 0
    runs.nothing_left(started.folder, started.family)


@pytest.mark.parametrize(
    ("settings", "what"),
    [(["--rollout-workers", "1000"], "1001 CPU"), (["--set", "launch.worker_gpus=8"], "8 GPU")],
)
def test_what_ray_does_not_have_is_refused(settings: list[str], what: str, tiny_model: Path, tmp_path: Path) -> None:
    """failures.md 30."""
    code, out, folder = runs.train(runs.config(tiny_model, tmp_path), "--launcher", "ray", *settings, timeout_s=60)
    assert code == 2
    assert f"they ask for {what} (the cluster has" in out
    assert not folder.exists()


def test_requests() -> None:
    plain = config_of().launch
    assert request("worker", plain, gpus=False) == {"CPU": 1.0}
    assert request("worker", plain, gpus=True) == {"CPU": 1.0, "GPU": 1.0}
    asked = config_of({"launch": {"worker_cpus": 3, "worker_gpus": 0.5, "rank_resources": {"big": 1}}}).launch
    assert request("worker", asked, gpus=False) == {"CPU": 3.0, "GPU": 0.5}
    assert request("learner", asked, gpus=False) == {"CPU": 1.0, "big": 1.0}
    assert request("learner", config_of({"launch": {"device": "cuda"}}).launch, gpus=False)["GPU"] == 1.0
    assert request("learner", config_of({"launch": {"device": "cpu"}}).launch, gpus=True) == {"CPU": 1.0}
    assert missing([{"CPU": 2}, {"CPU": 2, "GPU": 1}], {"CPU": 4.0}) == {"GPU": (1, 0.0)}


def test_several_nodes_get_keys_and_weights_over_the_network(tmp_path: Path) -> None:
    one, two = (configured(config_of(), tmp_path, nodes=nodes) for nodes in (1, 2))
    assert (one.weights.transport, two.weights.transport) == ("auto", "zmq")
    joined = configured(config_of({"launch": {"launcher": "ray", "ray_address": "auto"}}), tmp_path, nodes=1)
    assert joined.weights.transport == "zmq"  # another node may join
    assert one.buffer.security == two.buffer.security
    assert (tmp_path / "keys").stat().st_mode & 0o77 == 0
    assert two.buffer.security.bind == "tcp://{host}:*"
    chosen = config_of({"buffer": {"security": {"keys": "mine", "bind": "tcp://10.0.0.1:5000"}}})
    assert configured(chosen, tmp_path, nodes=2).buffer == chosen.buffer


# --- two hosts ---------------------------------------------------------------------------------------------------

NEAR, FAR = "async-rl-near", "async-rl-far"
PORT = 6411


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def within(namespace: str, *command: str) -> list[str]:
    return ["ip", "netns", "exec", namespace, *command]


@contextmanager
def two_hosts() -> Iterator[None]:
    """Namespaces with an address each, joined by a pair of interfaces."""
    try:
        for name in (NEAR, FAR):
            ip("netns", "add", name)
        ip("link", "add", "arl-a", "netns", NEAR, "type", "veth", "peer", "name", "arl-b", "netns", FAR)
        for name, link, address in ((NEAR, "arl-a", "10.77.0.1/24"), (FAR, "arl-b", "10.77.0.2/24")):
            ip("-n", name, "addr", "add", address, "dev", link)
            ip("-n", name, "link", "set", link, "up")
            ip("-n", name, "link", "set", "lo", "up")
    except (OSError, subprocess.CalledProcessError) as error:
        _forget_hosts()
        pytest.skip(f"network namespaces cannot be made here: {error}")
    try:
        yield
    finally:
        _forget_hosts()


def _forget_hosts() -> None:
    for name in (NEAR, FAR):
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            ip("netns", "del", name)


@contextmanager
def cluster(temporary: Path) -> Iterator[None]:
    """A Ray head on the near host, with room for the learner, and a node on the far one, with room for workers."""
    ray = str(Path(sys.executable).with_name("ray"))
    head = [ray, "start", "--block", "--head", f"--port={PORT}", "--node-ip-address=10.77.0.1", "--num-cpus=2"]
    head += ["--resources", '{"near": 1}', "--include-dashboard=false", f"--temp-dir={temporary}"]
    node = [ray, "start", "--block", f"--address=10.77.0.1:{PORT}", "--node-ip-address=10.77.0.2", "--num-cpus=2"]
    node += ["--resources", '{"far": 2}']
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for namespace, command in ((NEAR, head), (FAR, node)):
            log = (temporary.parent / f"{namespace}.log").open("wb")
            processes.append(
                subprocess.Popen(within(namespace, *command), stdout=log, stderr=log, start_new_session=True)
            )
            _until_there(namespace, 2 if namespace == FAR else 1)
        yield
    finally:
        for process in processes:
            family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
            process.send_signal(signal.SIGTERM)
            _, alive = psutil.wait_procs(family, timeout=10)
            for left in alive:
                left.kill()
            process.wait()


def _until_there(namespace: str, nodes: int) -> None:
    """Until the cluster has so many nodes."""
    ask = f"import ray; ray.init('10.77.0.1:{PORT}'); print('nodes', sum(n['Alive'] for n in ray.nodes()))"
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        done = subprocess.run(within(NEAR, sys.executable, "-c", ask), capture_output=True, text=True, check=False)
        if f"nodes {nodes}" in done.stdout:
            return
        time.sleep(0.5)
    raise AssertionError(f"Ray in {namespace} did not start")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make network namespaces")
def test_two_hosts_and_ten_seconds_without_a_link(tiny_model: Path, tmp_path: Path) -> None:
    """Workers on one host, learner and buffer on the other."""
    overrides = {
        "steps": 40,
        "weights.probe_every": 1,
        "launch.ray_address": f"10.77.0.1:{PORT}",
        "launch.launcher": "ray",
        "launch.worker_resources": {"far": 1},
        "launch.rank_resources": {"near": 1},
        "rollout.workers": 2,
        "rollout.slots": 4,
        **SLOW,
    }
    config = runs.config(tiny_model, tmp_path, **overrides)
    with two_hosts(), cluster(Path("/tmp") / f"ray-{os.getpid()}"):
        command = within(NEAR, sys.executable, "-m", "launchers.cli", "train", str(config))
        process = subprocess.Popen(
            command, cwd=runs.ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "PYTHONPATH": str(runs.ROOT)},
        )  # fmt: skip
        started = runs.Started(process, tmp_path / "runs" / "run")
        started.until(lambda: started.steps() >= 10)
        for worker in of_run(started.folder, "async_rl.rollout.worker"):
            assert namespace_of(worker) != namespace_of(of_run(started.folder, "async_rl.learner.rank")[0])
        ip("-n", NEAR, "link", "set", "arl-a", "down")
        time.sleep(10)
        ip("-n", NEAR, "link", "set", "arl-a", "up")
        code, out = started.wait(240)
    assert code == 0, out
    result = runs.adds_up(started.folder)
    assert (result.steps, result.lost_workers, result.discarded_tokens, result.tickets.failed) == (40, 0, 0, 0)
    assert each_once(started.folder, result.tickets.trained)


def namespace_of(process: psutil.Process) -> str:
    return os.readlink(f"/proc/{process.pid}/ns/net")
