"""Forms of attention tried on a device: their shapes, and errors of the device."""

import jax
import jax.numpy as jnp
import pytest

from ragen_jax.benchmarks import attention_forms, stages, suite_sizes
from ragen_jax.benchmarks.suite import Stage

CONTEXT, HEADS = 96, (4, 2, 8)
FORMS = attention_forms.forms(CONTEXT, HEADS, "xla")


@pytest.mark.parametrize("name", FORMS)
def test_every_form_computes_finite_numbers(name):
    assert attention_forms.outcome(FORMS[name]) == "works"


def refuse(_):
    raise RuntimeError("an illegal memory access")


def broken():
    """Computes what fails once it runs, after it was asked for."""
    shape = jax.ShapeDtypeStruct((), jnp.float32)
    return jax.jit(lambda x: jax.pure_callback(refuse, shape, x))(jnp.float32(1))


@pytest.fixture
def tried(monkeypatch):
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

    def measured():
        stage = Stage("device", "?", "device")
        return list(stages.measure(stage, suite_sizes.SMOKE, None))

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
