"""What `async-rl launch-files` writes can be read by what it is for."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from launchers import cli


def write(folder: Path, *arguments: str) -> int:
    return cli.run(["launch-files", "quickstart", "--output", str(folder), *arguments])


def test_a_batch_script_that_bash_accepts(tmp_path: Path) -> None:
    assert write(tmp_path, "--nodes", "4", "--gpus", "8", "--time", "02:00:00") == 0
    script = tmp_path / "run.sbatch"
    subprocess.run(["bash", "-n", str(script)], check=True)
    text = script.read_text()
    for line in ("#SBATCH --nodes=4", "#SBATCH --gpus-per-node=8", "#SBATCH --time=02:00:00", "#SBATCH --requeue"):
        assert f"\n{line}\n" in text
    assert "async-rl train quickstart --launcher ray --resume auto --ray-address=" in text


def run_script(folder: Path, *, nodes: str) -> list[str]:
    """Runs the script with stand-ins for Slurm's and Ray's programs; what was called, in no order."""
    programs = {
        "scontrol": "printf '%s\\n' $NODES",
        "srun": 'shift 2; [ "$1" = --overlap ] && shift; shift 2; exec "$@"',
        "hostname": "echo 10.0.0.9 10.0.0.10",
        "ray": 'echo "ray $*" >> $CALLS; [ "$1" = status ] || sleep 0.2',
        "async-rl": 'echo "async-rl $*" >> $CALLS; exit 7',
    }
    for name, body in programs.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    calls = folder / "calls"
    environment = {"PATH": f"{folder}:/usr/bin:/bin", "NODES": nodes, "CALLS": str(calls), "SLURM_JOB_NODELIST": "x"}
    done = subprocess.run(["bash", str(folder / "run.sbatch")], env=environment, timeout=30, check=False)
    assert done.returncode == 7  # that of the run
    return calls.read_text().splitlines()


def test_the_script_starts_a_head_the_nodes_and_the_run(tmp_path: Path) -> None:
    assert write(tmp_path, "--nodes", "3", "--gpus", "0", "--cpus", "4") == 0
    calls = run_script(tmp_path, nodes="a b c")
    address = "10.0.0.9:6379"
    assert "ray start --head --block --node-ip-address=10.0.0.9 --port=6379 --num-cpus=4" in calls
    assert calls.count(f"ray start --block --address={address} --num-cpus=4") == 2
    assert f"async-rl train quickstart --launcher ray --resume auto --ray-address={address}" in calls


def test_a_manifest_with_what_kuberay_asks_for(tmp_path: Path) -> None:
    assert write(tmp_path, "--nodes", "3", "--gpus", "2", "--cpus", "8", "--image", "me/rl:1", "--claim", "nfs") == 0
    job = yaml.safe_load((tmp_path / "rayjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"], job["metadata"]["name"]) == ("ray.io/v1", "RayJob", "quickstart")
    cluster = job["spec"]["rayClusterSpec"]
    (group,) = cluster["workerGroupSpecs"]
    assert group["replicas"] == group["minReplicas"] == group["maxReplicas"] == 2
    for pod in (cluster["headGroupSpec"]["template"], group["template"]):
        (container,) = pod["spec"]["containers"]
        assert container["image"] == "me/rl:1"
        assert container["resources"]["limits"] == {"cpu": 8, "memory": "16Gi", "nvidia.com/gpu": 2}
        claimed = [volume for volume in pod["spec"]["volumes"] if "persistentVolumeClaim" in volume]
        assert claimed == [{"name": "shared", "persistentVolumeClaim": {"claimName": "nfs"}}]
    assert "--ray-address auto" in job["spec"]["entrypoint"]


@pytest.mark.parametrize("wrong", [["--nodes", "0"], ["--gpus", "1", "--nodes", "1"], ["--cpus", "0"]])
def test_clusters_that_are_too_small_are_refused(wrong: list[str], tmp_path: Path) -> None:
    assert write(tmp_path / "none", *wrong) == 2
    assert not (tmp_path / "none").exists()


def test_files_that_are_there_are_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert write(tmp_path) == 0
    (tmp_path / "run.sbatch").write_text("mine")
    assert write(tmp_path) == 2
    assert (tmp_path / "run.sbatch").read_text() == "mine"
    assert "exists" in capsys.readouterr().err
