from dataclasses import dataclass, replace

import numpy as np
import pytest

from toyexp import AdamW, Optimiser, RunFailed, UserError
from toyexp.interfaces.optimiser import FROM_SCRATCH, LORA, MODES, Group
from toyexp.plugins.discovery import load
from toyexp_optimisers.adamw import AdamWOptimiser
from toyexp_optimisers.sgd import Lion


def test_from_scratch_feeds_the_constant_betas_at_every_step():
    expected = [1e-3, 0.9, 0.95, 1e-8, 0.0, 0.9, 0.95]
    for step in (0, 1, 2, 1000):
        assert AdamW.for_from_scratch().hp_for_step(step).tolist() == expected


def test_lora_feeds_the_bias_corrections_counted_from_one():
    for t in (1, 2, 10, 1000):
        expected = [1e-3, 0.9, 0.999, 1e-8, 0.0, 1 / (1 - 0.9**t), 1 / (1 - 0.999**t)]
        assert AdamW.for_lora().hp_for_step(t - 1).tolist() == expected
    assert AdamW.for_lora().hp_for_step(0)[5:] == pytest.approx([10.0, 1000.0], rel=1e-12)


def test_hp_carries_changed_settings_in_their_slots():
    adamw = AdamW(lr=0.5, beta1=0.25, beta2=0.75, eps=1e-3, weight_decay=0.1, mode=FROM_SCRATCH)
    hp = adamw.hp_for_step(0)
    assert hp.tolist() == [0.5, 0.25, 0.75, 1e-3, 0.1, 0.25, 0.75]
    assert hp.shape == (7,) and hp.dtype == np.float64


def test_a_fresh_adamw_has_the_originals_defaults_and_no_mode():
    fresh = AdamW()
    assert (fresh.lr, fresh.beta1, fresh.beta2, fresh.eps, fresh.weight_decay) == (1e-3, 0.9, 0.95, 1e-8, 0.0)
    assert fresh.mode is None


@pytest.mark.parametrize(
    ("adamw", "words"), [(AdamW(), "mode=None: .*from_scratch, lora"), (AdamW(mode="lorra"), r"did you mean lora\?")]
)
def test_an_unset_or_unknown_mode_is_rejected(adamw, words):
    with pytest.raises(UserError, match=words):
        adamw.hp_for_step(0)


def sizes_of_updates(adamw, steps):
    """The size of each update of one weight under a constant gradient of 1, over lr: the contract's formula."""
    m = v = 0.0
    sizes = {}
    for step in range(steps):
        lr, b1, b2, eps, _, s5, s6 = adamw.hp_for_step(step)
        m, v = b1 * m + (1 - b1), b2 * v + (1 - b2)
        sizes[step + 1] = lr * (m * s5) / (np.sqrt(v * s6) + eps) / adamw.lr
    return sizes


def test_constant_betas_scale_a_constant_gradient_as_in_the_original():
    sizes = sizes_of_updates(AdamW.for_from_scratch(), 500)
    golden = {1: 0.4129, 2: 0.5619, 5: 0.7950, 10: 0.9494, 500: 0.9234}
    assert {t: round(float(sizes[t]), 4) for t in golden} == golden


def test_bias_correction_makes_every_step_of_a_constant_gradient_the_learning_rate():
    assert list(sizes_of_updates(AdamW.for_lora(), 50).values()) == pytest.approx([1.0] * 50, rel=1e-7)


@pytest.mark.parametrize(("default", "beta2"), [(FROM_SCRATCH, 0.95), (LORA, 0.999)])
def test_settings_take_mode_and_beta2_from_the_recipe(default, beta2):
    adamw = replace(AdamWOptimiser().with_mode(default).adamw, lr=0.01)
    assert (adamw.mode, adamw.beta2, adamw.lr) == (default, beta2, 0.01)
    assert adamw.hp_for_step(0).shape == (7,)


def test_recipes_and_models_have_their_optimiser_mode():
    offers = load().offers
    recipes = {name: offer.cls.optim_mode for name, offer in offers["recipe"].items()}
    expected = {"scratch": FROM_SCRATCH, "warm": FROM_SCRATCH, "vit_tiny": FROM_SCRATCH, "lora": LORA, "full": LORA}
    assert recipes == expected
    assert {name for name, offer in offers["model"].items() if offer.cls.optim_mode == LORA} == {"gpt2"}


@pytest.mark.parametrize("mode", MODES)
def test_every_setting_is_passed_in_its_slot_in_both_modes(mode):
    assert AdamWOptimiser(weight_decay=0.1).with_mode(mode).adamw.hp_for_step(0)[4] == 0.1
    settings = AdamWOptimiser(beta1=0.25, beta2=0.75, eps=1e-3, weight_decay=0.1)
    slots = {FROM_SCRATCH: [0.25, 0.75], LORA: [1 / (1 - 0.25**2), 1 / (1 - 0.75**2)]}
    hp = replace(settings.with_mode(mode).adamw, lr=0.5).hp_for_step(1)
    assert hp.tolist() == [0.5, 0.25, 0.75, 1e-3, 0.1, *slots[mode]]


@pytest.mark.parametrize("name", ["beta1", "beta2"])
def test_a_beta_of_0_is_accepted_in_lora_mode_only(name):
    """With beta 0 the bias correction is 1; constant betas would multiply the moment by 0."""
    settings = AdamWOptimiser(**{name: 0.0})
    settings.check()
    slot = {"beta1": 5, "beta2": 6}[name]
    assert [settings.with_mode(LORA).adamw.hp_for_step(step)[slot] for step in (0, 6)] == [1.0, 1.0]
    with pytest.raises(UserError, match=rf"optim\.{name}=0: .*optim\.mode=lora"):
        settings.with_mode(FROM_SCRATCH)


@pytest.mark.parametrize("chosen", MODES)
@pytest.mark.parametrize("default", MODES)
def test_a_chosen_mode_wins_over_the_recipes_and_brings_its_own_beta2(chosen, default):
    assert AdamWOptimiser(mode=chosen).with_mode(default).adamw == AdamWOptimiser().with_mode(chosen).adamw


def test_the_title_of_adamw_says_whether_a_mode_corrects_the_bias():
    titles = [AdamWOptimiser().with_mode(mode).title for mode in (LORA, FROM_SCRATCH)]
    assert titles == [
        "AdamW with bias correction, betas 0.9 and 0.999 (optim.mode=lora)",
        "AdamW without bias correction, betas 0.9 and 0.95 (optim.mode=from_scratch)",
    ]


def test_a_chosen_beta2_wins_over_the_modes():
    assert AdamWOptimiser(mode=LORA, beta2=0.5).with_mode(FROM_SCRATCH).adamw.beta2 == 0.5


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mode": "scratch"}, "optim.mode=scratch: did you mean from_scratch"),
        ({"beta1": 1.0}, "optim.beta1=1.0"),
        ({"beta1": -0.1}, "optim.beta1=-0.1"),
        ({"beta2": 1.0}, "optim.beta2=1.0"),
        ({"eps": 0.0}, "optim.eps=0.0"),
        ({"eps": float("inf")}, "optim.eps=inf"),
        ({"weight_decay": -1.0}, "optim.weight_decay=-1.0"),
        ({"weight_decay": float("inf")}, "optim.weight_decay=inf"),
        ({"grad_clip": -1.0}, "optim.grad_clip=-1.0"),
        ({"accumulate": 0}, "optim.accumulate=0"),
    ],
)
def test_invalid_settings_are_rejected_by_name(settings, words):
    with pytest.raises(UserError) as error:
        AdamWOptimiser(**settings).check()
    assert str(error.value).startswith(words)


def test_the_recorded_optimiser_has_its_name_and_the_learning_rate():
    for name, offer in load().offers["optim"].items():
        recorded = offer.cls().with_mode(LORA).describe(0.02)
        assert (recorded["name"], recorded["lr"]) == (name, 0.02)


def test_the_defaults_pass_their_own_check():
    AdamWOptimiser().check()


def test_factors_scale_only_the_settings_of_their_names():
    """A name that this rule lacks is another rule's; decay and the scale of the rate are the group's own."""
    group = Group(Lion(weight_decay=0.9, beta1=0.8, beta2=0.6), ("w",), weight_decay=0.5, lr_scale=2.0)
    assert group.numbers(3, 0.01).tolist() == pytest.approx([0.02, 1 - 0.02 * 0.5, 0.8, 0.6], rel=1e-15)
    scaled = group.numbers(3, 0.01, {"weight_decay": 0.25, "beta1": 0.75, "momentum": 0.0})
    assert scaled.tolist() == pytest.approx([0.02, 1 - 0.02 * 0.125, 0.6, 0.6], rel=1e-15)
    assert group.numbers(3, 0.01).tolist()[2] == 0.8, "each step's factor is of the setting, not of the last step's"


@dataclass
class Turning(Optimiser):
    """Gives its numbers in another order from the fourth step on, and other ones from the sixth."""

    name = "turning"

    def slots(self, shape):
        return {}

    def numbers(self, step, lr, weight_decay):
        numbers = {"lr": lr, "kept": 1 - lr * weight_decay}
        return {"gone": 1.0} if step >= 5 else dict(reversed(numbers.items())) if step >= 3 else numbers

    def update(self, ops, w, g, state, n):
        return ops.sub(ops.scale(w, n["kept"]), ops.scale(g, n["lr"])), state


def test_unknown_numbers_are_rejected():
    group = Group(Turning(), ("w",), weight_decay=0.5)
    assert group.numbers(0, 0.1).tolist() == group.numbers(3, 0.1).tolist() == [0.1, 0.95]
    with pytest.raises(RunFailed, match=r"optim\.turning: numbers\(\) returned gone at step 6, expected lr, kept"):
        group.numbers(5, 0.1)


@pytest.mark.parametrize("name", sorted(load().offers["optim"]))
def test_the_recorded_optimiser_has_the_common_settings(name):
    settings = {"grad_clip": 0.5, "accumulate": 2, "groups": {"w": {"lr": 0.1}}}
    recorded = load().offers["optim"][name].cls(**settings).with_mode(LORA).describe(0.02)
    assert {k: recorded[k] for k in settings} == settings
