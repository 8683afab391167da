"""Forms of attention tried on a device: their shapes, and errors of the device."""

import jax
import jax.numpy as jnp
import pytest

from ragen_jax.benchmarks import attention_forms, stages, suite, suite_sizes
from ragen_jax.benchmarks.suite import Stage

CONTEXT, HEADS = 96, (4, 2, 8)
FORMS = attention_forms.forms(CONTEXT, HEADS, "xla")


@pytest.mark.parametrize("name", FORMS)
def test_every_form_computes_finite_numbers(name):
    assert attention_forms.outcome(FORMS[name]) == "works"


@pytest.mark.slow
def test_rows_on_all_devices_have_the_gradients_that_they_have_on_one():
    devices = jax.device_count()
    assert devices > 1
    made = attention_forms.forms(CONTEXT, HEADS, "xla", devices)
    (name,) = made.keys() - FORMS.keys()
    assert name == "rows of 128 tokens on all devices, with gradients, 4 heads of 8"
    rows = attention_forms._rows(2 * devices, 128, 0, HEADS)
    alone = lambda: attention_forms._gradient_of("xla")(*rows)
    assert attention_forms.outcome(made[name], alone) == "works"


def refuse(_):
    raise RuntimeError("an illegal memory access")


def broken():
    """Computes what fails once it runs, after it was asked for."""
    shape = jax.ShapeDtypeStruct((), jnp.float32)
    return jax.jit(lambda x: jax.pure_callback(refuse, shape, x))(jnp.float32(1))


@pytest.fixture
def tried(monkeypatch, tmp_path):
    """Outcomes of the `device` stage where cuDNN is said to be there."""
    made = {"good": lambda: jnp.ones(2), "nan": lambda: jnp.nan, "bad": broken}
    made |= {"wrong": lambda: jnp.array([1.0, 0.9])}
    forms = made | {"last": lambda: jnp.ones(2)}
    good = dict.fromkeys(forms, forms["good"])
    by_name = {"cudnn": forms, "xla": good}
    monkeypatch.setattr(attention_forms, "forms", lambda *given: by_name[given[2]])
    monkeypatch.setattr(
        attention_forms.backend_choices, "has_cudnn_attention", lambda *_: True
    )
    limits = type("Limits", (), {"figures": lambda _: {"read, GB/s": 1.0}})
    monkeypatch.setattr("ragen_jax.benchmarks.device.device_limits", limits)

    def measured(earlier=None):
        stage = Stage("device", "?", "device")
        tables = {"cuDNN's attention": earlier or {}}
        suite.write(tmp_path, suite.Result("device", tables=tables))
        return list(stages.measure(stage, suite_sizes.SMOKE, tmp_path))

    return measured


def test_an_error_that_comes_while_waiting_is_the_forms_own(tried):
    titles = [title for title, _ in tried()]
    assert titles[:2] == ["device", "at best"]  # Known whatever the forms do.
    outcomes = tried()[-1][1]
    assert outcomes["bad"].startswith("fails: ")
    others = {name: said for name, said in outcomes.items() if name != "bad"}
    assert others == {
        "good": "works",
        "nan": "not finite",
        "wrong": "differs from plain operations by 10% of the largest value",
        "last": "works",
    }


def test_a_form_behind_one_that_took_the_device_along_is_not_tried(tried, monkeypatch):
    answers = iter([True, True, True, True, False])
    monkeypatch.setattr(attention_forms, "_answers", lambda: next(answers))
    assert tried()[-1][1]["last"] == "not tried: no device is left"


def test_a_form_is_compared_with_plain_operations_value_by_value():
    """By another loss than the sum, of which each query's gradient is nearly 0."""
    name = "rows of 128 tokens, with gradients, 4 heads of 8"
    query, key, value = FORMS[name]()
    scales = [float(abs(x).max()) for x in (query, key, value)]
    assert all(scale > 0.1 for scale in scales)
    swapped = lambda: (query, key[::-1], value)  # The rows of the batch exchanged.
    assert attention_forms.outcome(FORMS[name], FORMS[name]) == "works"
    assert attention_forms.outcome(swapped, FORMS[name]).startswith("differs from")


@pytest.mark.parametrize("kind", ["decoding", "messages"])
def test_a_wrong_value_in_the_longest_slot_is_seen(kind, monkeypatch):
    """It is a mean of many values, small beside those of the shortest slot."""
    name = f"{kind}, 4 heads of 8"
    scales = jnp.array([2.891, 0.349, 0.117])  # largest of 1, 375 and 2624 positions
    right = jnp.ones((3, 1, 4, 8)) * scales[:, None, None, None]
    wrong = right.at[-1, :, -1].set(0)
    assert attention_forms.outcome(lambda: wrong, lambda: right) == "works"
    made = lambda *given: {name: lambda: {"cudnn": wrong, "xla": right}[given[2]]}
    monkeypatch.setattr(attention_forms, "forms", made)
    choices = attention_forms.backend_choices
    monkeypatch.setattr(choices, "has_cudnn_attention", lambda *_: True)
    *_, outcomes = attention_forms.tried([(CONTEXT, HEADS)], {})
    assert outcomes[name].startswith("differs from plain operations by 100%")


def test_what_a_process_found_before_it_ended_stands_and_the_rest_is_tried(tried):
    earlier = {"good": "fails: once", "nan": "begun"}
    earlier |= {"bad": "not tried: no device is left"}
    outcomes = tried(earlier)[-1][1]
    assert outcomes["good"] == "fails: once"
    assert outcomes["nan"] == "ended its process, or came to its time limit"
    assert outcomes["bad"].startswith("fails: ") and outcomes["last"] == "works"


@pytest.mark.parametrize("expected", [[1.0, jnp.nan], [0.0, 0.0]])
def test_values_that_cannot_be_compared_do_not_count_as_equal(expected):
    form = lambda: (jnp.ones(2), jnp.ones(2))
    plain = lambda: (jnp.array(expected), jnp.ones(2))
    assert attention_forms.outcome(form, plain).startswith("differs from plain")
    assert attention_forms.outcome(plain, plain) in ("works", "not finite")


def test_what_fails_with_one_models_heads_is_avoided_with_those_alone():
    other = (2, 1, 16)
    names = [*FORMS, *attention_forms.forms(CONTEXT, other, "xla")]
    outcomes = dict.fromkeys(names, "works")
    assert len(outcomes) == 2 * len(FORMS)
    outcomes["decoding, 2 heads of 16"] = "not finite"
    avoided = attention_forms.settings_without_failing
    assert avoided(outcomes, CONTEXT, HEADS) == {}
    assert avoided(outcomes, CONTEXT, other) == {"rollout.decode_attention": "xla"}
    # Of several GPUs, which the process of a forecast does not see.
    several = {
        "rows of 128 tokens on all devices, with gradients, 4 heads of 8": "hangs"
    }
    found = avoided(outcomes | several, CONTEXT, HEADS)
    assert found == {"model.attention": "xla"}
