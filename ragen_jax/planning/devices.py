"""Descriptions of devices to plan for, read from device_data/*.toml.

target.py gives them to XLA's compiler, work.py takes its figures from them.
"""

import dataclasses
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ragen_jax.errors import UserError

_FOLDER = Path(__file__).parent / "device_data"
# Limits of CUDA, equal on all described devices: fields of XLA's GpuDeviceInfoProto.
_COMMON = """\
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: 2048
  shared_memory_per_block: 49152
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  device_address_bits: 64
  ecc_enabled: true
  device_vendor: "NVIDIA Corporation"
"""
# The oldest versions that jax[cuda13] installs.
_CUDA, _CUDNN = "13.0.0", (9, 12, 0)


@dataclasses.dataclass(frozen=True)
class Figures:
    """Peak rates of one device by its data sheet, for the roofline (work.py)."""

    memory_bandwidth: float  # bytes/s read or written
    matmul_bfloat16: float  # FLOP/s, dense
    matmul_float32: float  # FLOP/s, dense, in TensorFloat-32
    within_host: float  # bytes/s in each direction, to devices of the same host
    between_hosts: float  # bytes/s in each direction, per device, to other hosts


@dataclasses.dataclass(frozen=True)
class Description:
    """What a plan needs to know of any device."""

    name: str  # "h100"
    title: str  # "NVIDIA H100 80GB HBM3", the name that a plan is headed by
    per_host: int  # devices in a typical host
    memory: int  # bytes: of a GPU all that the driver reports, of a TPU XLA's limit


@dataclasses.dataclass(frozen=True)
class Gpu(Description):
    """What the compiler and the roofline need to know of an NVIDIA GPU."""

    capability: tuple[int, int]  # CUDA's compute capability
    l2_cache: int  # bytes
    figures: Figures
    target_config: str  # XLA's GpuTargetConfigProto in text form


@dataclasses.dataclass(frozen=True)
class Tpu(Description):
    """What the compiler needs to know of a TPU, which it knows the rest of itself."""

    slices: Mapping[int, str]  # by the number of devices, such as 8: "2x4"


def names() -> list[str]:
    """The known values of --target, such as "h100"."""
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


def read(name: str) -> Description:
    """Reads the description of a device.

    Raises:
      UserError: if there is none of this name.
    """
    if name not in names():
        raise UserError(
            f"--target={name}: this device has no description: choose one of"
            f" {', '.join(names())}"
        )
    values = tomllib.loads((_FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
    return (_read_tpu if "slices" in values else _read_gpu)(name, values)


def _read_tpu(name: str, values: dict[str, Any]) -> Tpu:
    return Tpu(
        name=name,
        title=values["title"],
        per_host=values["per_host"],
        memory=values["memory_bytes"],
        slices={int(count): shape for count, shape in values["slices"].items()},
    )


def _read_gpu(name: str, values: dict[str, Any]) -> Gpu:
    compiler = values["compiler"]
    major, minor = map(int, compiler["compute_capability"].split("."))
    return Gpu(
        name=name,
        title=values["title"],
        per_host=values["per_host"],
        capability=(major, minor),
        memory=compiler["memory_bytes"],
        l2_cache=compiler["l2_bytes"],
        figures=Figures(**values["figures"]),
        target_config=_target_config(values["title"], compiler, major, minor),
    )


def _target_config(title: str, compiler: dict, major: int, minor: int) -> str:
    """XLA's GpuTargetConfigProto in text form, from one [compiler] table."""
    extension = "ACCELERATED_FEATURES" if compiler["accelerated"] else "NONE"
    numbers = {
        "memory_bandwidth": "memory_bandwidth",
        "device_memory_size": "memory_bytes",
        "core_count": "cores",
        "fpus_per_core": "fpus_per_core",
        "clock_rate_ghz": "clock_ghz",
        "l2_cache_size": "l2_bytes",
        "shared_memory_per_core": "shared_memory_per_core",
        "shared_memory_per_block_optin": "shared_memory_per_block_optin",
        "pcie_bandwidth": "pcie_bandwidth",
    }
    lines = [f"  {field}: {compiler[key]}" for field, key in numbers.items()]
    versions = ("driver_version", "runtime_version", "compile_time_toolkit_version")
    lines += [f'  {version}: "{_CUDA}"' for version in versions]
    return (
        "gpu_device_info {\n"
        f"{_COMMON}"
        + "\n".join(lines)
        + f'\n  dnn_version: "{".".join(map(str, _CUDNN))}"\n'
        f'  name: "{title}"\n'
        f"  cuda_compute_capability {{ major: {major} minor: {minor}"
        f" feature_extension: {extension} }}\n"
        "  device_interconnect_info {"
        f" active_links: {compiler['active_links']} }}\n"
        "}\n"
        'platform_name: "CUDA"\n'
        "dnn_version_info {"
        f" major: {_CUDNN[0]} minor: {_CUDNN[1]} patch: {_CUDNN[2]} }}\n"
        f'device_description_str: "{title}"\n'
    )
