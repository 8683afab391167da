"""The shared part of launch scripts: flags, config, mistakes reported in a sentence.

A script says `_CONFIG = cli.define_config()`, defines its other absl flags, writes
`main()`, and ends in `cli.run(main)`. Nothing here imports JAX before the flags are
parsed, so that a wrong one is reported at once.
"""

import os

# Must be set before transformers is imported: it advises to install PyTorch, which
# nothing here needs.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from ragen_jax.cli.flags import (  # noqa: E402
    changed_keys,
    chooses_config,
    config_path,
    define_config,
    keys_set,
    load_config,
    names_config,
    parse,
    read_settings,
    refuse_unread,
)
from ragen_jax.cli.help_text import group as group_flags
from ragen_jax.cli.outputs import check_out, check_out_folder
from ragen_jax.cli.planning import PlanFlags, plan_for_target
from ragen_jax.cli.startup import (
    check_alone,
    enable_compilation_cache,
    local_path,
    make_workdir,
    run,
    silence,
    start_jax,
    start_jax_alone,
    use_cpu,
    use_every_core,
    user_mistakes,
)

__all__ = [
    "PlanFlags",
    "changed_keys",
    "check_alone",
    "check_out",
    "check_out_folder",
    "chooses_config",
    "config_path",
    "define_config",
    "enable_compilation_cache",
    "group_flags",
    "keys_set",
    "load_config",
    "local_path",
    "make_workdir",
    "names_config",
    "parse",
    "plan_for_target",
    "read_settings",
    "refuse_unread",
    "run",
    "silence",
    "start_jax",
    "start_jax_alone",
    "use_cpu",
    "use_every_core",
    "user_mistakes",
]
