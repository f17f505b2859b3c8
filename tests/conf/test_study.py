"""The study of a search: sampled trials, the journal that stores them, importances and pruning."""

import math
import os
import pickle
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from toyexp.base.errors import UserError
from toyexp.config.words import parse
from toyexp.results.importance import _ranks, compute_shares
from toyexp.sweeps.search.pruning import Pruning, first_pruning_step
from toyexp.sweeps.search.space import count_points, make_probes, parse_space
from toyexp.sweeps.search.study import Judge, Study

optuna = pytest.importorskip("optuna")

LOG = "lr=tag(log, interval(1e-4, 1e-1))"


def trials(study):
    """Load the trials from the journal with Optuna."""
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(study.path)))
    return optuna.load_study(study_name=None, storage=storage).trials


KEYS = [LOG, "a=range(1,9,2)", "b=x,y"]


@pytest.mark.parametrize("search", ["random", "tpe"])
def test_a_started_trial_without_a_result_is_sampled_again(tmp_path, search):
    keys = parse_space(search, parse(KEYS))
    study = Study(tmp_path, search, "loss", keys, 0)
    chosen = [study.ask(0), study.ask(1)]
    study.tell(0, 1.0)
    study.tell(0, 2.0)  # the second result is ignored
    later = Study(tmp_path, search, "loss", keys, 0)
    assert [later.ask(1), later.ask(1)] == [chosen[1]] * 2
    assert len(trials(study)) == 2 and trials(study)[0].value == 1.0
    assert later.ask(2)[0] not in {words[0] for words in chosen}  # the sampler continues and does not restart
    with pytest.raises(UserError, match=r"study\.log: is damaged: holds 3 of the 4 trials"):
        later.require_trials(4)


def test_grid_search_tries_each_combination_once_and_varies_the_last_key_fastest(tmp_path):
    keys = parse_space("grid", parse(KEYS[1:]))
    study = Study(tmp_path, "grid", "loss", keys, 0)
    assert [study.ask(n) for n in range(8)] == [[f"a={a}", f"b={b}"] for a in (1, 3, 5, 7) for b in "xy"]


class MaliciousPickle:
    def __reduce__(self):
        return (os.mkdir, ("broken-in",))


def test_a_malicious_journal_runs_no_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    keys = parse_space("cmaes", parse([LOG, "a=interval(0, 1)"]))
    study = Study(tmp_path, "cmaes", "loss", keys, 0)
    for number in range(14):  # two generations, whose state Optuna stores
        study.ask(number)
        study.tell(number, float(number))
    Study(tmp_path, "cmaes", "loss", keys, 0).ask(14)  # a valid state is accepted
    states = [trial for trial in trials(study) if any("optimizer" in key for key in trial.system_attrs)]
    assert states
    storage = study._study._storage
    number = study._study.ask()._trial_id
    storage.set_trial_system_attr(number, "cma:optimizer:0", pickle.dumps(MaliciousPickle()).hex())
    with pytest.raises(UserError, match=r"study\.log: is damaged: UnpicklingError: names posix\.mkdir"):
        Study(tmp_path, "cmaes", "loss", keys, 0)
    (tmp_path / "study.log").write_text("{}\nno line of a journal\n")
    with pytest.raises(UserError, match=r"study\.log: is damaged"):
        Study(tmp_path, "tpe", "loss", keys, 0)
    assert not Path("broken-in").exists()


@pytest.mark.parametrize(
    ("search", "words", "points"),
    [
        ("random", ["a=1,2,3", "b=range(0.1,0.35,0.1)", "c=int(interval(3,4))"], 18),
        ("tpe", ["a=1,2,3", "b=range(0.1,0.35,0.1)", "c=int(interval(3,4))"], 18),
        ("cmaes", ["b=range(0.1,0.55,0.1)", "c=tag(log,int(interval(3,6)))"], 20),
        ("tpe", ["a=choice(only)"], 1),
    ],
)
def test_no_trial_repeats_before_all_combinations_are_used(tmp_path, search, words, points):
    keys = parse_space(search, parse(words))
    assert count_points(keys) == points
    study, drawn = Study(tmp_path, search, "loss", keys, 0), []
    for number in range(points):
        drawn.append(tuple(study.ask(number)))
        study.tell(number, float(number % 3))
    assert len(set(drawn)) == points
    assert study.ask(points)[0].partition("=")[2]  # one more repeats a trial


def test_an_interval_has_infinitely_many_values(tmp_path):
    keys = parse_space("tpe", parse([LOG, "a=1,2"]))
    assert count_points(keys) == float("inf")


def test_tpe_finds_the_optimum_from_reported_results(tmp_path):
    """TPE samples near the best trial: of 20 trials, at least 10 are close to the optimum."""
    keys = parse_space("tpe", parse(["lr=tag(log, interval(1e-4, 1e-1))", "a=interval(0.0, 1.0)"]))
    study = Study(tmp_path, "tpe", "loss", keys, 3)
    near = 0
    for number in range(40):
        lr, a = (float(word.partition("=")[2]) for word in study.ask(number))
        distance = abs(math.log10(lr / 1e-2)) / 3 + abs(a - 0.8)
        study.tell(number, distance)
        near += number >= 20 and distance < 0.2
    assert near >= 10


DRAW = {
    "lr": lambda number: 10 ** number.uniform(-5, 0),
    "a": lambda number: number.uniform(-1, 1),
    "b": lambda number: number.uniform(-1, 1),
    "narrow": lambda number: number.uniform(0.5, 0.51),
    "name": lambda number: number.choice(["adamw", "sgd", "lion", "muon"]),
    "x": lambda number: number.choice("xy"),
    "few": lambda number: number.choice([1, 2]),
    "many": lambda number: number.randrange(100),
}
# The searched keys, the score, and the expected share of each key or the expected note.
EXPECTED_SHARES = {
    "one decides": ("lr a b", lambda p, noise: (math.log10(p["lr"]) + 2.5) ** 2, {"lr": 1}),
    "two are equal": ("a b many", lambda p, noise: p["a"] ** 2 + p["b"] ** 2, {"a": 0.5, "b": 0.5}),
    "three to one": ("a b many", lambda p, noise: 3**0.5 * p["a"] + p["b"], {"a": 0.75, "b": 0.25}),
    "an interaction": ("a b many", lambda p, noise: p["a"] * p["b"], {"a": 0.5, "b": 0.5}),
    "an interaction of names": ("x few a", lambda p, noise: (p["x"] == "x") == (p["few"] == 1), {"x": 0.5, "few": 0.5}),
    "a name": ("name a", lambda p, noise: {"adamw": 0, "sgd": 3, "lion": 1, "muon": 2}[p["name"]], {"name": 1}),
    "divergence above a rate": ("lr a", lambda p, noise: 3 - p["lr"] if p["lr"] < 0.1 else 1e30, {"lr": 1}),
    "a narrow range": ("a narrow", lambda p, noise: p["a"] + p["narrow"], {"a": 1}),
    "two values of hundred": ("few many a", lambda p, noise: p["few"], {"few": 1}),
    "hundred values of two": ("few many a", lambda p, noise: p["many"], {"many": 1}),
    "half noise": ("a b", lambda p, noise: p["a"] + noise.gauss(0, 0.4), {"a": 1}),
    "noise alone": ("a b lr", lambda p, noise: noise.gauss(0, 1), "do not predict"),
    "a constant": ("a b lr", lambda p, noise: 2.5, "same score"),
}


@pytest.mark.parametrize("case", EXPECTED_SHARES)
def test_importances_match_functions_with_known_shares(case):
    keys, score, expected = EXPECTED_SHARES[case]
    for seed in range(5):
        rng = random.Random(seed)
        points = [{key: DRAW[key](rng) for key in keys.split()} for _ in range(60)]
        scores = [score(point, rng) for point in points]
        shares, why = compute_shares({key: [point[key] for point in points] for key in keys.split()}, scores)
        if isinstance(expected, str):
            assert not shares and expected in why
            continue
        assert not why and shares == pytest.approx({key: expected.get(key, 0) for key in shares}, abs=0.2), shares
        assert sum(shares.values()) == pytest.approx(1)
        few_values = {key: [point[key] for point in points[:4]] for key in keys.split()}
        assert compute_shares(few_values, scores[:4])[1]
    assert "change together" in compute_shares({"a": range(60), "b": range(0, 120, 2)}, range(60))[1]


def test_importance_is_unknown_if_a_model_predicts_a_tenth_of_the_variance_or_has_as_many_columns_as_points():
    number = random.Random(0)
    scores = [point + number.gauss(0, 45) for point in range(60)]
    noise = [number.random() for _ in range(60)]
    assert "do not predict" in compute_shares({"a": range(60), "b": noise}, scores)[1]
    number = random.Random(1)
    a, b = ([number.uniform(-1, 1) for _ in range(11)] for _ in "ab")
    assert "do not predict" in compute_shares({"a": a, "b": b}, [x * y for x, y in zip(a, b, strict=True)])[1]


def test_equal_scores_have_the_mean_of_their_ranks():
    ranks = np.array([1.5, 1.5, 3.0, 4.0])
    assert _ranks([1, 1, 2, 5]) == pytest.approx((ranks - 2.5) / ranks.std())


def test_importances_rank_pruned_trials_below_completed_ones(tmp_path):
    """Half are pruned, with a loss that grows with the distance from the best lr; among the others, `a` decides."""
    study = Study(tmp_path, "random", "loss", parse_space("random", parse([LOG, "a=interval(0.0, 1.0)"])), 0)
    for point in range(40):
        lr, a = (float(word.partition("=")[2]) for word in study.ask(point))
        distance = abs(math.log10(lr) + 2.5)
        Judge(study.path, point, "asha", 10).should_stop(10, 5 + distance)
        study.tell(point, None if distance > 0.75 else 3 + a)
    shares, why = study.importances()
    assert not why and shares["lr"] > 0.8
    completed = [trial for trial in trials(study) if trial.state.name == "COMPLETE"]
    completed_shares, _ = compute_shares(
        {key: [t.params[key] for t in completed] for key in ("lr", "a")}, [trial.value for trial in completed]
    )
    assert completed_shares["a"] > 0.95  # without pruned trials, lr would not matter


def test_only_a_pruned_trial_has_the_step_of_its_score_which_is_its_last(tmp_path):
    study = Study(tmp_path, "random", "loss", parse_space("random", parse([LOG])), 0)
    for point, final in enumerate((None, 3.0, None)):
        study.ask(point)
        for step in (10, 20) if point < 2 else ():
            Judge(study.path, point, "asha", 10).should_stop(step, 50 / step)
        study.tell(point, final)
    found = [(row["trial"], row["state"], row["score"], row["step"]) for row in study.outcomes()]
    assert found == [(0, "pruned", 2.5, 20), (1, "complete", 3.0, None), (2, "pruned", None, None)]


@pytest.mark.parametrize(("metric", "sign"), [("loss", 1), ("accuracy", -1)])
def test_asha_keeps_the_better_half_at_a_quarter_and_at_half_of_the_steps(tmp_path, metric, sign):
    keys, rng = parse_space("random", parse([LOG])), random.Random(1)
    study, scores_by_step = Study(tmp_path, "random", metric, keys, 0), {10: [], 20: []}
    for point in range(12):
        study.ask(point)
        judge, stopped = Judge(study.path, point, "asha", 10), False
        for step in (5, 10, 15, 20, 25):
            score = rng.random()
            stopped = judge.should_stop(step, score)
            if step in scores_by_step:  # keep the better half of the trials that reached this step, and at least one
                scores_by_step[step].append(sign * score)
                assert stopped == (
                    sorted(scores_by_step[step]).index(sign * score) >= max(len(scores_by_step[step]) // 2, 1)
                )
            else:
                assert not stopped
            if stopped:
                break
        study.tell(point, None if stopped else score)
    assert len(scores_by_step[10]) == 12 and 1 < len(scores_by_step[20]) < 12


def test_median_pruning_compares_with_completed_trials_from_the_first_pruning_step(tmp_path):
    study = Study(tmp_path, "random", "loss", parse_space("random", parse([LOG])), 0)
    for point in range(5):
        study.ask(point)
        judge = Judge(study.path, point, "median", 10)
        assert not any(judge.should_stop(step, point / 10) for step in (5, 10, 15))
        study.tell(point, point / 10)
    study.ask(5)
    judge = Judge(study.path, 5, "median", 10)
    assert [judge.should_stop(step, 9.0) for step in (5, 10)] == [False, True]


@pytest.mark.parametrize(
    ("steps", "every", "first"), [(160, 40, 40), (160, 20, 40), (200, 50, 50), (100, 30, 30), (8, 2, 2), (10, 9, 9)]
)
def test_the_first_pruning_step_is_in_the_second_quarter(steps, every, first):
    assert first_pruning_step(steps, every) == first and first % every == 0 and first >= steps / 4 > first - every


@pytest.mark.parametrize("prune", ["asha", "median"])
def test_a_resumed_run_gets_the_same_pruning_decisions_again(tmp_path, prune):
    study = Study(tmp_path, "random", "loss", parse_space("random", parse([LOG])), 0)
    for point in range(6):
        study.ask(point)
        judge = Judge(study.path, point, prune, 10)
        stopped = [judge.should_stop(step, point + step / 100) for step in (10, 15, 20, 25)]
        if point < 5:  # the journal stores all reported scores
            study.tell(point, float(point))
    again = Judge(study.path, 5, prune, 10)
    assert [again.should_stop(step, 5 + step / 100) for step in (10, 15, 20, 25)] == stopped and stopped[0]
    assert list(trials(study)[5].intermediate_values) == [10, 15, 20, 25]


def test_sampled_numbers_have_four_digits_and_stay_in_their_interval(tmp_path):
    keys = parse_space("random", parse(["a=interval(0.123456, 0.123457)", "b=interval(1.0, 2.0)"]))
    study = Study(tmp_path, "random", "loss", keys, 0)
    drawn = [[float(word.partition("=")[2]) for word in study.ask(number)] for number in range(30)]
    assert all(0.123456 <= a <= 0.123457 for a, _ in drawn)
    assert all(float(f"{b:.4g}") == b for _, b in drawn) and any(float(f"{b:.3g}") != b for _, b in drawn)


def test_equal_seeds_sample_equal_trials_and_other_seeds_do_not(tmp_path):
    keys, drawn = parse_space("random", parse([LOG])), []
    for folder, seed in (("a", 0), ("b", 0), ("c", 1)):
        (tmp_path / folder).mkdir()
        study = Study(tmp_path / folder, "random", "loss", keys, seed)
        drawn.append([study.ask(number) for number in range(3)])
    assert drawn[0] == drawn[1] and not {tuple(w) for w in drawn[0]} & {tuple(w) for w in drawn[2]}


def test_a_run_is_not_pruned_at_its_last_step():
    pruning = Pruning(Path("study.log"), 0, "asha", "loss", 2)
    pruning._judge = SimpleNamespace(should_stop=lambda step, score: step > 0)
    for step in (0, 8):
        pruning.on_eval(SimpleNamespace(steps=8), step, {"loss": 1.0})
        assert pruning.stop_reason() is None
    pruning.on_eval(SimpleNamespace(steps=8), 4, {"loss": 1.0})
    assert (
        pruning.stop_reason()
        == "sweep.prune=asha: the held-out loss 1.0 after step 4 is worse than that of other trials"
    )
    with pytest.raises(UserError, match=r"sweep\.metric=loss: unknown metric; evaluations have ppl"):
        pruning.on_eval(SimpleNamespace(steps=8), 4, {"ppl": 1.0})


def test_probes_cover_each_value_and_both_ends_of_an_interval():
    keys = parse_space("tpe", parse(["a=x,y,z", "b=interval(0.0, 1.0)", "c=int(interval(2, 5))"]))
    assert [probe.overrides for probe in make_probes(keys)] == [
        ["a=x", "b=0.0", "c=2"], ["a=y", "b=0.0", "c=2"], ["a=z", "b=0.0", "c=2"],
        ["a=x", "b=1.0", "c=2"], ["a=x", "b=0.0", "c=5"],
    ]  # fmt: skip
