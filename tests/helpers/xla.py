"""XLA's flags for tests, which compile far more than they compute."""

from importlib.metadata import version

# Unoptimized machine code, and the emitters that XLA had before: together a third of
# the usual compile time. An unknown flag ends a process, so the second is given only to
# the versions that are known to have it; others are merely slower. And devices that
# wait for each other on a busy machine have ten minutes instead of 40 s.
FLAGS = (
    "--xla_backend_optimization_level=0"
    " --xla_cpu_collective_call_terminate_timeout_seconds=600"
)
AS_SHIPPED = {}  # Options of one compilation whose text a test reads.
if version("jaxlib").startswith("0.10."):
    FLAGS += " --xla_cpu_use_fusion_emitters=false"
    AS_SHIPPED = {"xla_cpu_use_fusion_emitters": True}
