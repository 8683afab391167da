r"""A supervised start: trains a model to reply as an environment demonstrates.

  python docs/examples/imitate.py --config=docs/examples/coin_walk_config.py \
      --out=runs/imitated
  python launch/train.py --config=docs/examples/coin_walk_config.py \
      --config.model.path=runs/imitated --workdir=runs/coins

In each step of the first command the config's environment plays new training levels by
its `demonstrate`; the second command trains from the result. docs/environments.md says
what an environment needs for it, and what it brings.
"""

import functools
import shlex
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags

from ragen_jax import cli
from ragen_jax.errors import UserError
from ragen_jax.learning import supervised
from ragen_jax.models.io import hugging_face
from ragen_jax.rollout import tasks
from ragen_jax.rollout.demonstrate import demonstrate_episode
from ragen_jax.text import prompts
from ragen_jax.text.phrases import tokenize_phrases
from ragen_jax.training import run as run_lib
from ragen_jax.training import weights

_CONFIG = cli.define_config()
_OUT = flags.DEFINE_string("out", "runs/imitated", "Folder to write; must not exist.")
_STEPS = flags.DEFINE_integer("steps", 100, "Optimizer steps.", lower_bound=1)
_ROWS = flags.DEFINE_integer("rows", 32, "Episodes of a step.", lower_bound=1)
_RATE = flags.DEFINE_float("rate", 1e-3, "Learning rate; pretrained models: 1e-5.", 0)


def main() -> None:
    """Imitates the environment of --config, and writes the model to --out."""
    out = cli.check_out_folder(_OUT.value)
    settings = cli.read_settings(_CONFIG.value)
    if settings.lora.rank:
        raise UserError("lora.rank: imitation trains the whole model: set it to 0")
    if not 0 < _RATE.value < np.inf:
        raise UserError(f"--rate={_RATE.value}: choose a number above 0, such as 1e-3")
    cli.start_jax_alone(settings, "imitation")
    with cli.user_mistakes():
        run = run_lib.prepare(settings)
        run_lib.check_levels_of_run(run)
    draw = demonstrator(run, _ROWS.value)
    parameters = train(weights.load_parameters(run.model), run, draw)
    if not all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(parameters)):
        raise UserError(f"--rate={_RATE.value}: the weights are not finite: lower it")
    with cli.user_mistakes():
        hugging_face.write_folder(
            out,
            run.model.config,
            jax.device_get(parameters),
            run.model.tokenizer,
            stop_tokens=run.model.pieces.stop_tokens,
        )
    # The same environment, whatever was changed of it.
    words = [f"--config={cli.config_path()}"]
    words += [word for word in sys.argv if word.startswith("--config.")]
    words += [f"--config.model.path={out}"]
    print(f"wrote {out}; next: {shlex.join(['python', 'launch/train.py', *words])}")


def demonstrator(run: run_lib.Run, rows: int):
    """A function from a key to tokens int32[R, T], is_reply bool[R, T], success [R].

    Raises:
      UserError: if the environment demonstrates nothing, or never succeeds.
    """
    task, tokens, env = run.tasks[0], run.tokens[0], run.tasks[0].env
    if len(run.tasks) > 1 or env.demonstrate is None:
        raise UserError(
            f"env.name = {run.settings.env.name!r} has no demonstrate: name one"
            " environment with demonstrate, as docs/examples/coin_walk.py is"
        )
    replies = tokenize_phrases(run.model.tokenizer, env.reply_phrases)
    constants = env, task.dialogue, tokens, replies, run.model.pieces.end_token

    def make_draw(context):
        play = lambda key: demonstrate_episode(key, *constants, context)
        return jax.jit(lambda key: jax.vmap(play)(jax.random.split(key, rows)))

    longest = tasks.longest_row(run.tasks, run.tokens)
    _, is_reply, success = make_draw(longest)(jax.random.key(0))
    if not success.any():
        raise UserError(
            f"none of {rows} demonstrated episodes succeeds: see whether replies fit"
            f" into rollout.reply_tokens = {run.settings.rollout.reply_tokens}, and"
            " whether python -m ragen_jax.testing.check_env finds them valid with"
            f" env.thinking = {run.settings.env.thinking}"
        )
    # Mostly far fewer than there is room for; a longer row will lose its last replies.
    used = 1 + int(np.flatnonzero(is_reply.any(axis=0))[-1])
    return make_draw(min(longest, 64 * -(-used // 64)))


def train(parameters, run: run_lib.Run, draw):
    """The parameters after imitating a new batch of `draw` in each step, by AdamW."""
    steps, config = _STEPS.value, run.model.config
    opening = jnp.array(prompts.opening_tokens(run.tokens[0]))  # Of every row.
    schedule = optax.warmup_cosine_decay_schedule(0.0, _RATE.value, steps // 10, steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(parameters, state, tokens, is_reply):
        loss, gradient = jax.value_and_grad(supervised.imitation_loss)(
            parameters, tokens, is_reply, config, opening
        )
        change, state = optimizer.update(gradient, state, parameters)
        return optax.apply_updates(parameters, change), state, loss

    state, seed = optimizer.init(parameters), jax.random.key(run.settings.seed)
    for step in range(1, steps + 1):
        tokens, is_reply, success = draw(jax.random.fold_in(seed, step))
        parameters, state, loss = update(parameters, state, tokens, is_reply)
        if step % 10 == 0 or step == steps:
            print(
                f"step {step}/{steps}  loss {loss:.3f} nats a reply token;"
                f" {success.mean():.0%} of the demonstrations succeed",
                flush=True,
            )
    return parameters


if __name__ == "__main__":
    cli.run(main)
