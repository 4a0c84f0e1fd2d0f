"""Who joins, who leaves, who hangs, who is started again."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from async_rl.config import Config
from launchers import pools
from launchers.errors import ComponentDied
from launchers.health import Health
from launchers.hosts import Handle, Spec
from launchers.supervisor import TRY_AGAIN, Supervisor


@pytest.mark.parametrize(
    ("staying", "taken", "wanted", "expected"),
    [
        ([0], [0], 3, ([1, 2], [])),
        ([0, 1, 2], [0, 1, 2], 1, ([], [1, 2])),
        ([0, 2], [0, 2], 3, ([1], [])),  # 1 has gone
        ([0], [0, 1], 2, ([2], [])),  # 1 is still leaving
        ([0, 1], [0, 1], 2, ([], [])),
    ],
)
def test_changes_of_a_pool(
    staying: list[int], taken: list[int], wanted: int, expected: tuple[list[int], list[int]]
) -> None:
    assert pools.changes(staying, taken, wanted) == expected


def test_what_was_asked_for_last_counts(tmp_path: Path) -> None:
    assert pools.asked(tmp_path) is None
    pools.ask(tmp_path, 3)
    pools.ask(tmp_path, 2)
    assert pools.asked(tmp_path) == 2


def test_a_worker_that_the_buffer_has_given_up_is_lost_after_its_grace() -> None:
    health = Health(worker_grace_s=15, buffer_silence_s=60)
    living = ["worker0#1", "worker1#22"]
    assert health.lost_workers(living, [], 0) == []  # still starting
    both = ["worker0#1.ab", "worker1#22.cd"]
    assert health.lost_workers(living, both, 10) == []
    assert health.lost_workers(living, ["worker1#22.cd", "worker0#11.xx"], 20) == []
    assert health.lost_workers(living, both, 30) == []  # it had only been stopped
    assert health.lost_workers(living, both[1:], 40) == []
    assert health.lost_workers(living, both[1:], 55) == ["worker0#1"]
    assert health.lost_workers(["worker0#2", "worker1#22"], both[1:], 56) == []


def test_a_silent_buffer_is_found_once_a_silence() -> None:
    health = Health(worker_grace_s=15, buffer_silence_s=60)
    assert not health.buffer_is_silent(100, 159)
    assert health.buffer_is_silent(100, 160)
    assert not health.buffer_is_silent(100, 219)
    assert health.buffer_is_silent(100, 220)


class FakeProcess:
    """Ends when it is told to."""

    def __init__(self, spec: Spec, number: int) -> None:
        self.identity = f"{spec.name}#{number}"
        self.code: int | None = None
        self.got: list[signal.Signals] = []

    def poll(self) -> int | None:
        return self.code

    def signal(self, sig: signal.Signals) -> None:
        self.got.append(sig)

    def kill(self) -> None:
        self.code = -9 if self.code is None else self.code

    def prepare_end(self) -> None: ...

    def finish(self, timeout_s: float) -> None: ...


class FakeHost:
    def __init__(self) -> None:
        self.started: list[str] = []
        self.by_name: dict[str, FakeProcess] = {}

    def start(self, spec: Spec) -> Handle:
        self.started.append(spec.name)
        spec.log.write_text("its last words")
        process = self.by_name[spec.name] = FakeProcess(spec, len(self.started))
        return process

    def configured(self, config: Config, folder: Path) -> Config:
        return config

    def release(self, name: str) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def host() -> FakeHost:
    return FakeHost()


@pytest.fixture
def supervisor(tmp_path: Path, host: FakeHost) -> Supervisor:
    supervisor = Supervisor(tmp_path, host, 2)
    for role, count in (("buffer", 1), ("learner", 2), ("worker", 2)):
        for rank in range(count):
            supervisor.start(role, "module", rank)
    return supervisor


def test_a_lost_rank_takes_the_others_with_it(supervisor: Supervisor, host: FakeHost) -> None:
    host.by_name["learner1"].code = -9
    found = supervisor.check()
    assert found.ranks_lost
    assert [child.name for child in found.died] == ["learner1"]
    assert host.by_name["learner0"].code == -9
    assert supervisor.having("learner") == []
    assert not supervisor.done("learner")
    assert not supervisor.check().ranks_lost


def test_a_worker_is_started_again_at_once_and_then_with_patience(supervisor: Supervisor, host: FakeHost) -> None:
    host.by_name["worker1"].code = -11
    assert [child.name for child in supervisor.check().died] == ["worker1"]
    assert host.started.count("worker1") == 2
    host.by_name["worker1"].code = TRY_AGAIN
    supervisor.check()
    assert host.started.count("worker1") == 2  # a second later
    assert supervisor.ranks("worker") == {0, 1}
    assert supervisor.give_up("worker", 1)
    assert supervisor.ranks("worker") == {0}


def test_the_last_restart_is_followed_by_an_error_unless_there_was_progress(
    supervisor: Supervisor, host: FakeHost
) -> None:
    for _ in range(2):
        host.by_name["buffer0"].code = -9
        supervisor.check()
    supervisor.progress()
    for _ in range(2):
        host.by_name["buffer0"].code = -9
        supervisor.check()
    host.by_name["buffer0"].code = -9
    with pytest.raises(ComponentDied, match="buffer0 was killed by SIGKILL"):
        supervisor.check()


@pytest.mark.parametrize(("name", "code"), [("worker0", 1), ("learner0", 1), ("worker0", 0), ("buffer0", 0)])
def test_an_error_of_its_own_is_not_made_good(name: str, code: int, supervisor: Supervisor, host: FakeHost) -> None:
    host.by_name[name].code = code
    with pytest.raises(ComponentDied, match=f"{name} ended with exit code {code}.*\n.*its last words"):
        supervisor.check()


def test_who_was_asked_to_go_does_not_die(supervisor: Supervisor, host: FakeHost) -> None:
    child = supervisor.having("worker")[1]
    supervisor.dismiss(child)
    assert host.by_name["worker1"].got == [signal.SIGUSR1]
    assert supervisor.having("worker") == supervisor.having("worker")[:1]
    host.by_name["worker1"].code = -15
    found = supervisor.check()
    assert found.left == [child]
    assert found.died == []


def test_a_learner_that_is_stopped_by_the_user_is_not_started_again(supervisor: Supervisor, host: FakeHost) -> None:
    supervisor.let_die("learner")
    host.by_name["learner0"].code = -15
    with pytest.raises(ComponentDied, match="SIGTERM"):
        supervisor.check()
