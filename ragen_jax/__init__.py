"""ragen_jax: multi-turn reinforcement learning of language-model agents, in JAX.

starpo.py      the method: sample, filter, score, reward, advantage, optimize
trajectory.py  the record that the sampler writes and all else reads
errors.py      errors that a user can fix

settings/      settings of a config, read and checked
parallel/      the device mesh and several processes
envs/          environments: reset, step, observe; no tokens
testing/       checks of an environment, built in or a user's own
text/          phrases to tokens, reply bytes to actions, chat templates
models/        the transformer, its files, and the embedded model
rollout/       the sampling engine: slots over one persistent KV cache
learning/      rewards, filters, advantages, losses: functions of the record
training/      a run: programs, weights, checkpoints, validation, messages
evaluation/    success on unseen levels, baselines, transcripts
diagnostics/   instruments that see a collapse coming
reporting/     metrics, curves, console lines
studies/       grids of runs, with intervals and verdicts
cli/           flags, start-up and messages of the launch scripts
warm_start/    the supervised start of the embedded model
planning/      memory and time of programs compiled for absent devices
benchmarks/    speed, beside other libraries where they are installed
utils/         files and modules: what every folder may use
"""

__version__ = "0.1.0"
