"""Files that start a run where a scheduler owns the machines: `async-rl launch-files CONFIG`.

`run.sbatch`    a Slurm job: a Ray head on the first node, a Ray node on each other one, then the run
`rayjob.yaml`   a KubeRay RayJob: a head that has the learner, a group of workers

Both resume by themselves when the scheduler starts them again.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import yaml

from async_rl.config import Config

PORT = 6379

SBATCH = """#!/bin/bash
# A Ray cluster on the nodes of this job, and one run on it. Submit with: sbatch {file}
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task={cpus}
{gpus}#SBATCH --time={time}
#SBATCH --requeue
#SBATCH --signal=B:INT@120
set -euo pipefail

nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
head=${{nodes[0]}}
address=$(srun --nodes=1 --ntasks=1 -w "$head" hostname --ip-address | awk '{{print $1}}')

srun --nodes=1 --ntasks=1 --overlap -w "$head" \\
  ray start --head --block --node-ip-address="$address" --port={port} --num-cpus={cpus} {ray_gpus}&
for node in "${{nodes[@]:1}}"; do
  srun --nodes=1 --ntasks=1 --overlap -w "$node" \\
    ray start --block --address="$address:{port}" --num-cpus={cpus} {ray_gpus}&
done

until ray status --address="$address:{port}" > /dev/null 2>&1; do sleep 1; done
# This script is on the first node. The signal before the time limit reaches the run, which saves; the requeued job goes
# on from there.
{command} --ray-address="$address:{port}" &
run=$!
trap 'kill -INT $run' INT
set +e
wait $run
code=$?
while kill -0 $run 2> /dev/null; do wait $run; code=$?; done
exit $code
"""


def slurm(config: Config, source: str, *, nodes: int, cpus: int, gpus: int, time: str) -> str:
    """The text of a batch script for `nodes` nodes of `cpus` cores and `gpus` GPUs each."""
    return SBATCH.format(
        file="run.sbatch",
        name=config.name,
        nodes=nodes,
        cpus=cpus,
        gpus=f"#SBATCH --gpus-per-node={gpus}\n" if gpus else "",
        ray_gpus=f"--num-gpus={gpus} " if gpus else "",
        time=time,
        port=PORT,
        command=shlex.join(command(source)),
    )


def command(source: str) -> list[str]:
    return ["async-rl", "train", source, "--launcher", "ray", "--resume", "auto"]


def kuberay(config: Config, source: str, *, nodes: int, cpus: int, gpus: int, image: str, claim: str) -> str:
    """A RayJob of `nodes` pods, the head one of them, that share the volume `claim` as their working directory."""
    resources: dict[str, Any] = {"cpu": cpus, "memory": "16Gi"} | ({"nvidia.com/gpu": gpus} if gpus else {})
    container = {
        "name": "ray",
        "image": image,
        "workingDir": "/shared",
        "resources": {"limits": resources, "requests": resources},
        "volumeMounts": [{"name": "shared", "mountPath": "/shared"}, {"name": "memory", "mountPath": "/dev/shm"}],
    }
    pod = {
        "spec": {
            "containers": [container],
            "volumes": [
                {"name": "shared", "persistentVolumeClaim": {"claimName": claim}},
                {"name": "memory", "emptyDir": {"medium": "Memory"}},  # weights are shared there
            ],
        }
    }
    cluster: dict[str, Any] = {"rayVersion": "2.58.0", "headGroupSpec": {"rayStartParams": {}, "template": pod}}
    if nodes > 1:
        cluster["workerGroupSpecs"] = [
            {"groupName": "nodes", "replicas": nodes - 1, "minReplicas": nodes - 1, "maxReplicas": nodes - 1,
             "rayStartParams": {}, "template": pod}
        ]  # fmt: skip
    name = "".join(letter if letter.isalnum() else "-" for letter in config.name.lower()).strip("-")
    job = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": name or "run"},
        "spec": {
            "entrypoint": shlex.join([*command(source), "--ray-address", "auto"]),
            "shutdownAfterJobFinishes": True,
            "backoffLimit": 3,
            "rayClusterSpec": cluster,
        },
    }
    return yaml.safe_dump(job, sort_keys=False, default_flow_style=False)


def write(folder: Path, files: dict[str, str]) -> list[Path]:
    """New files; one that exists is left alone with an error."""
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    for name, text in files.items():
        with (folder / name).open("x") as file:
            file.write(text)
        paths.append(folder / name)
    return paths
