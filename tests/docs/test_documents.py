"""The documents name files, commands, flags, configs and settings that exist."""

import itertools
import re
import shlex
from pathlib import Path

import pytest
from absl import flags as absl_flags
from helpers import runs

import ragen_jax
from ragen_jax import cli, envs
from ragen_jax import settings as settings_lib
from ragen_jax.envs import registry
from ragen_jax.studies import study

ROOT = Path(runs.ROOT)
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
EXAMPLES = sorted([*ROOT.glob("configs/**/*.py"), *ROOT.glob("docs/examples/*.py")])
PATH = re.compile(r"(?<![\w./-])(?:ragen_jax|launch|configs|tests|docs|\.ci)/[\w./*-]+")
CONFIG = re.compile(r"(?<![\w./-])((?:docs/examples|configs)/\w+\.py)((?::\w+)?)")
USERS_OWN = (
    "my_env.py",
    "my_rewards.py",
    "my_study.py",
)  # files that a reader would write


def _name(document):
    return str(document.relative_to(ROOT))


def _links(text):
    return re.findall(r"\]\(([^)\s]+)\)", text)


def _anchors(text):
    """What links can name behind a #: headings in small letters, spaces as hyphens."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"(?ms)^```.*?^```", "", text), re.M)
    return {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}


def _commands(text):
    """The command lines of a document: in blocks, indented, or between backticks."""
    blocks = re.findall(r"^```(?:ba)?sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    blocks = [block.replace("\\\n", " ") for block in blocks]
    lines = [line for block in blocks for line in block.splitlines()]
    lines += re.findall(r"^    ((?:\w+=\S+ )*python .*)$", text, re.MULTILINE)
    lines += re.findall(r"`(python -m [^`]*)`", text)
    words = [shlex.split(line, comments=True) for line in lines]
    # A line may hold several commands, one behind the other.
    for line in words:
        for is_and, command in itertools.groupby(line, lambda word: word == "&&"):
            if not is_and:
                yield list(itertools.dropwhile(_is_variable, command))


def _is_variable(word):
    """Whether it sets a variable for the command behind it, as in A=1 python ..."""
    return re.fullmatch(r"[A-Z_]+=.*", word)


@pytest.fixture(scope="module")
def flags():
    """The names of all flags that scripts define, from their sources."""
    sources = [*ROOT.glob("launch/*.py"), *ROOT.glob("ragen_jax/cli/*.py")]
    text = "".join(path.read_text() for path in (*sources, ROOT / "tests/soak.py"))
    # The benchmark's sizes are a table of names, usual values and helps.
    define = r"(?:DEFINE_\w+|add_argument)\(\s*\"(?:--)?([\w-]+)\"|\(\"(\w+)\", \d+, \""
    return {name for pair in re.findall(define, text) for name in pair} | {"help"}


def test_the_documents_are_found():
    names = {_name(document) for document in DOCUMENTS}
    assert {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/README.md"} <= names
    assert (ROOT / "LICENSE").read_text().count("Apache License") > 0


def test_there_are_links_paths_commands_and_configs_to_check():
    """Else the patterns that find them have become blind."""
    text = "\n".join(document.read_text() for document in DOCUMENTS)
    commands = [one for one in _commands(text) if one and one[0] == "python"]
    words = [word for command in commands for word in command]
    assert min(len(_links(text)), len(PATH.findall(text))) > 100
    assert len(CONFIG.findall(text)) > 100 and len(commands) > 50
    for flag in ("--config=", "--config."):
        assert sum(word.startswith(flag) for word in words) > 25


@pytest.mark.parametrize("document", DOCUMENTS + EXAMPLES, ids=_name)
def test_every_link_and_every_path_of_a_document_leads_to_a_file(document):
    text = document.read_text()
    for link in _links(text) if document.suffix == ".md" else ():
        if "://" not in link:
            path, _, anchor = link.partition("#")
            target = document.parent / path if path else document
            assert target.exists(), f"{_name(document)} links to {link}"
            if anchor:
                assert anchor in _anchors(target.read_text()), link
    for path in PATH.findall(text):
        path = path.rstrip("./").replace("NAME", "*")
        assert list(ROOT.glob(path)), f"{_name(document)} names {path}"


@pytest.mark.parametrize(
    "table",
    ["ESTIMATORS", "FILTER_STRATEGIES", "FILTER_METRICS", "AGGREGATIONS", "KL_KINDS"],
)
def test_every_choice_of_the_method_is_in_the_algorithms(table):
    text = (ROOT / "docs" / "algorithms.md").read_text()
    for name in getattr(settings_lib, table):
        assert re.search(rf"`{name}\b", text), name


def test_the_map_of_the_package_and_the_readme_name_every_folder():
    folders = {path.parent.name for path in ROOT.glob("ragen_jax/*/__init__.py")}
    modules = {path.name for path in ROOT.glob("ragen_jax/*.py")} - {"__init__.py"}
    named = re.findall(r"^(\w+(?:/|\.py)) ", ragen_jax.__doc__, re.MULTILINE)
    assert sorted(named) == sorted([*modules, *(f"{folder}/" for folder in folders)])
    table = (ROOT / "README.md").read_text().split("| folder of `ragen_jax` |")[1]
    rows = re.findall(r"^\| (`.*?) \|", table.split("\n\n")[0], re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == folders


def test_every_document_is_in_the_index():
    index = (ROOT / "docs" / "README.md").read_text()
    linked = {(ROOT / "docs" / link.split("#")[0]).resolve() for link in _links(index)}
    # What a study writes about itself is listed by the studies' own page.
    written = {path for path in DOCUMENTS if path.parent.name != "studies"}
    assert written - linked == {ROOT / "docs" / "README.md"}


def test_the_check_before_a_gpu_day_imports_every_requirement():
    text = (ROOT / "docs" / "planning.md").read_text()
    (imported,) = re.findall(r'python -c "import ([^;]+);', text)
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    required = [re.split("[<>=]", line)[0] for line in lines if line[0] != "#"]
    plain = lambda names: sorted(re.sub(r"[-.]", "_", name) for name in names)
    assert plain(imported.split(", ")) == plain(required)


@pytest.mark.parametrize("document", DOCUMENTS, ids=_name)
def test_every_command_of_a_document_runs_a_file_with_flags_that_exist(document, flags):
    for command in _commands(document.read_text()):
        if not command or command[0] != "python":
            continue
        if command[1] == "-m":
            script = command[2].replace(".", "/")
            assert list(ROOT.glob(f"{script}.py")), command
            continue
        if command[1] == "-c":
            compile(command[2], document.name, "exec")
            continue
        assert (ROOT / command[1]).is_file(), command
        for word in command[2:]:
            flag, _, value = word.removeprefix("--").partition("=")
            if flag.startswith("config."):
                continue  # Checked below, against the config.
            assert flag in flags, f"{_name(document)}: --{flag} of {command}"
            if value.endswith(".py") and value not in USERS_OWN:
                assert (ROOT / value).is_file(), command
            if flag == "env" and not value.endswith(".py"):
                assert value in (*envs.NAMES, "all"), command


@pytest.mark.parametrize("document", DOCUMENTS, ids=_name)
def test_every_config_of_a_document_has_the_variant_and_the_keys_it_names(document):
    text = document.read_text()
    # A config's own doc lists variants in a row, as in `configs/x.py:a`, `:b`.
    for path, variant in set(CONFIG.findall(text)):
        is_config = path.startswith("configs/")
        if is_config or "def get_config" in (ROOT / path).read_text():
            _keys(path + variant)
    for command in _commands(text):
        chosen = [w.partition("=")[2] for w in command if w.startswith("--config=")]
        if chosen:
            changed = [
                w[9:].split("=")[0] for w in command if w.startswith("--config.")
            ]
            unknown = set(changed) - _keys(chosen[0])
            assert not unknown, f"{_name(document)}: {unknown} of {command}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=_name)
def test_no_setting_of_a_documents_command_is_refused(document, monkeypatch):
    monkeypatch.chdir(ROOT)
    for command in _commands(document.read_text()):
        given = [word for word in command if re.match(r"--config[.=]", word)]
        # Supervised starts have settings of another kind.
        if not given or "launch/warm_start.py" in command:
            continue
        values = absl_flags.FlagValues()
        cli.define_config("configs/frozenlake.py", values)
        given = [word.replace("=SEED", "=0") for word in given]
        cli.parse(["train.py", *given], values)
        settings = cli.read_settings(values["config"].value)
        settings_lib.check_changed(settings, cli.changed_keys(values["config"].value))
        for task in (*settings.tasks(), *settings.evaluated_tasks()):
            registry.make(task.name, task.options)


@pytest.mark.parametrize("document", DOCUMENTS, ids=_name)
def test_every_setting_that_a_document_names_exists(document):
    keys = settings_lib.known_keys()
    # What follows "env." may be an environment's own.
    sections = {key.split(".")[0] for key in keys if "." in key} - {"env"}
    named = re.compile(r"(?<![\w./])(?:config\.)?([a-z_]+\.\w+)(?![\w.*/(])")
    for span in re.findall(r"`([^`\n]+)`", document.read_text()):
        for key in named.findall(span):
            assert key.split(".")[0] not in sections or key in keys, span


def test_every_study_that_a_document_begins_is_not_refused(tmp_path):
    pages = ROOT / "docs" / "studies"
    begun = set()
    # The page of a study has the command that wrote it, with the code of that day.
    for document in {*DOCUMENTS, pages / "README.md"} - {*pages.glob("[a-z]*.md")}:
        for command in _commands(document.read_text()):
            begun |= {w[8:] for w in command if w.startswith("--study=")}
    assert begun
    for name in begun - set(USERS_OWN):
        study.prepare(study.Choice(str(ROOT / name), tmp_path, pages))


def _keys(config):
    """The keys of a config, in which a section's leaf is written with a dot."""
    settings = cli.load_config(str(ROOT / config)).to_dict()
    return set(settings_lib.flatten(settings))
