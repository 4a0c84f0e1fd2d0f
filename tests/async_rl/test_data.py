"""Rows from every kind of source, the hold-out, and the order in which prompts are given out."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from async_rl.config import DataConfig, TaskConfig, parse
from async_rl.data import sources
from async_rl.data.prepare import prepare
from async_rl.data.prompts import Prompts, difficulties, order
from async_rl.errors import ConfigError, DataError
from async_rl.tokenizer import tokenizer_of

ROWS = [{"prompt": f"What is {i}?", "answer": i} for i in range(10)]


def write(folder: Path, kind: str) -> Path:
    path = folder / f"data.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    elif kind == "json":
        path.write_text(json.dumps(ROWS))
    elif kind == "parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    else:
        import datasets

        datasets.Dataset.from_list(ROWS).save_to_disk(path)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "folder"])
def test_every_kind_of_source_gives_the_same_rows(kind: str, tmp_path: Path) -> None:
    assert sources.rows(DataConfig(path=str(write(tmp_path, kind)))) == ROWS


def test_a_reasoning_gym_task_gives_rows_with_prompts() -> None:
    found = sources.rows(
        DataConfig(task=TaskConfig(name="basic_arithmetic", size=5, params={"min_terms": 2, "max_terms": 2}))
    )
    assert len(found) == 5
    assert all(row["prompt"] == row["question"] and row["answer"] for row in found)
    with pytest.raises(ConfigError, match=r"data\.task"):
        sources.rows(DataConfig(task=TaskConfig(name="no_such_task")))


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("a.jsonl", "", "no row"),
        ("a.jsonl", "{not json}", "line 1 is not JSON"),
        ("a.jsonl", "[1]", "not an object"),
        ("a.json", '{"prompt": 1}', "list of objects"),
        ("a.jsonl", '{"question": 1}', "no such column"),
        ("a.txt", "x", "not .jsonl"),
        ("a.parquet", "x", "cannot be read"),
    ],
)
def test_a_broken_source_says_what_is_wrong(name: str, content: str, why: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=why):
        sources.rows(DataConfig(path=str(tmp_path / name)))


def test_the_holdout_is_fixed_by_the_seed_and_never_trained_on() -> None:
    config = DataConfig(path="x", holdout=3, seed=1)
    train, held = sources.split(ROWS, config)
    assert (len(train), len(held)) == (7, 3)
    assert not {row["answer"] for row in train} & {row["answer"] for row in held}
    assert sources.split(ROWS, config) == (train, held)
    assert sources.split(ROWS, DataConfig(path="x", holdout=3, seed=2))[1] != held
    with pytest.raises(ConfigError, match=r"data\.holdout"):
        sources.split(ROWS, DataConfig(path="x", holdout=10))


def test_a_data_set_smaller_than_a_batch_is_refused_with_both_numbers_or_wraps() -> None:
    """failures.md 7."""
    tree = {"data": {"path": "x"}, "reward": {"function": "a:b"}, "buffer": {"batch_size": 64, "group_size": 4}}
    with pytest.raises(ConfigError, match=r"3 prompts.*takes 16"):
        sources.check_size(parse(tree), 3)
    sources.check_size(parse(tree), 16)
    sources.check_size(parse({**tree, "data": {"path": "x", "wrap": True}}), 3)


def test_a_change_of_data_changes_the_fingerprint() -> None:
    assert sources.fingerprint(ROWS) == sources.fingerprint(list(ROWS))
    assert sources.fingerprint(ROWS) != sources.fingerprint(ROWS[1:])


def test_each_epoch_is_another_permutation_and_a_restart_continues_it() -> None:
    keys = list(itertools.islice(order(5, seed=3, shuffle=True), 12))
    assert sorted(keys[:5]) == [(0, i) for i in range(5)]
    assert sorted(keys[5:10]) == [(1, i) for i in range(5)]
    assert [i for _, i in keys[:5]] != [i for _, i in keys[5:10]]
    assert list(itertools.islice(order(5, seed=3, shuffle=True, start=7), 5)) == keys[7:]
    assert list(itertools.islice(order(3, seed=0, shuffle=False), 4)) == [(0, 0), (0, 1), (0, 2), (1, 0)]


def test_a_curriculum_rises_in_its_epochs_and_a_restart_goes_on_in_the_same_order() -> None:
    hard = [3.0, 1.0, 2.0, 1.0, 2.0]
    how = {"seed": 3, "shuffle": True, "difficulty": hard, "curriculum_epochs": 2}
    keys = list(itertools.islice(order(5, **how), 15))
    for epoch in (0, 1):
        assert [hard[i] for e, i in keys if e == epoch] == sorted(hard)
    plain = list(itertools.islice(order(5, seed=3, shuffle=True), 15))
    assert keys[10:] == plain[10:]
    assert list(itertools.islice(order(5, start=7, **how), 8)) == keys[7:]


@pytest.mark.parametrize("value", ["hard", None, True, float("nan")])
def test_a_difficulty_that_is_no_number_is_named(value: object) -> None:
    rows = [json.dumps({"level": 1}).encode(), json.dumps({"level": value}).encode()]
    prompts = Prompts([np.zeros(1, np.int32)] * 2, rows, "")
    with pytest.raises(DataError, match="row 1"):
        difficulties(prompts, "level")
    assert difficulties(prompts, None) == []


def test_prompts_are_rendered_with_the_chat_template(tiny_model: Path, tmp_path: Path) -> None:
    tree = {"data": {"path": "x", "system_prompt": "Be brief."}, "reward": {"function": "a:b"}}
    tokenizer = tokenizer_of(str(tiny_model))
    prompts = prepare(parse(tree), ROWS, tokenizer)
    text = tokenizer.decode(prompts.tokens[0])
    assert text == "<|im_start|>Be brief.<|im_end|><|im_start|>What is 0?<|im_end|><|im_start|>"
    prompts.write(tmp_path / "p.npz")
    again = Prompts.read(tmp_path / "p.npz")
    assert [t.tolist() for t in again.tokens] == [t.tolist() for t in prompts.tokens]
    assert (again.rows, again.fingerprint) == (prompts.rows, prompts.fingerprint)


@pytest.mark.parametrize(
    ("row", "chat", "why"),
    [
        ({"prompt": ""}, False, "is empty"),
        ({"prompt": None}, True, "neither text nor messages"),
        ({"prompt": [{"role": "user", "content": "hi"}]}, False, "not text"),
    ],
)
def test_a_prompt_that_is_none_is_refused(row: dict, chat: bool, why: str, tiny_model: Path) -> None:
    config = parse({"data": {"path": "x", "chat_template": chat}})
    with pytest.raises(DataError, match=why):
        prepare(config, [row], tokenizer_of(str(tiny_model)))


def test_a_folder_of_splits_names_them(tmp_path: Path) -> None:
    import datasets

    one = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": one, "test": one}).save_to_disk(tmp_path / "both")
    with pytest.raises(DataError, match=r"\['test', 'train'\]"):
        sources.rows(DataConfig(path=str(tmp_path / "both")))


def test_a_prompt_over_the_limit_is_refused_before_the_start(tiny_model: Path) -> None:
    tree = {"data": {"path": "x", "max_prompt_tokens": 5}, "reward": {"function": "a:b"}}
    with pytest.raises(DataError, match=r"max_prompt_tokens = 5: a prompt has"):
        prepare(parse(tree), ROWS, tokenizer_of(str(tiny_model)))
