"""The embedded models, as the documents describe them."""

import re

import pytest
from helpers.paths import ROOT

from ragen_jax.envs import registry
from ragen_jax.models import presets

# The environments as docs/tiny_model.md writes them.
WRITTEN = {
    "frozen_lake": "FrozenLake",
    "sokoban": "Sokoban",
    "bandit": "Bandit",
    "search_qa": "SearchQA",
    "webshop": "WebShop",
}


@pytest.mark.parametrize("name", presets.EMBEDDED)
def test_the_document_names_the_environments_that_an_embedded_model_was_taught(name):
    text = (ROOT / "docs" / "tiny_model.md").read_text()
    pattern = rf"^\| \[?`{name}`[^|]*\|[^|]*\|[^|]*\|([^|]*)\|"
    (taught,) = re.findall(pattern, text, re.MULTILINE)
    named = {env for env in registry.NAMES if WRITTEN.get(env, env) in taught}
    assert named == set(presets.TAUGHT[name])


def test_the_folders_of_the_package_that_hold_models_are_the_embedded_models():
    (folder,) = {path.parent for path in presets.EMBEDDED.values()}
    found = {path.parent.name for path in folder.glob("*/config.json")}
    assert found == set(presets.EMBEDDED)
