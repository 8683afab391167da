"""Forms of attention tried on a device: their shapes, and errors of the device."""

import jax
import jax.numpy as jnp
import pytest

from ragen_jax.benchmarks import attention_forms, stages
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
    forms = made | {"last": lambda: jnp.ones(2)}
    monkeypatch.setattr(attention_forms, "forms", lambda *_: forms)
    monkeypatch.setattr(
        attention_forms.backend_choices, "has_cudnn_attention", lambda *_: True
    )
    limits = type("Limits", (), {"figures": lambda _: {"read, GB/s": 1.0}})
    monkeypatch.setattr("ragen_jax.benchmarks.device.device_limits", limits)

    def measured():
        stage = Stage("device", "?", "device")
        return list(stages.measure(stage, stages.SMOKE, None))

    return measured


def test_an_error_that_comes_while_waiting_is_the_forms_own(tried):
    titles = [title for title, _ in tried()]
    assert titles[:2] == ["device", "at best"]  # Known whatever the forms do.
    outcomes = tried()[-1][1]
    assert outcomes["bad"].startswith("fails: ")
    others = {name: said for name, said in outcomes.items() if name != "bad"}
    assert others == {"good": "works", "nan": "not finite", "last": "works"}


def test_a_form_behind_one_that_took_the_device_along_is_not_tried(tried, monkeypatch):
    answers = iter([True, True, True, False])
    monkeypatch.setattr(attention_forms, "_answers", lambda: next(answers))
    assert tried()[-1][1]["last"] == "not tried: no device is left"
