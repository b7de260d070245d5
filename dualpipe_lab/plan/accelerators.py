"""`CLUSTERS`: accelerators and the links that are usual for them, with their sources.

In: data sheets, benchmark entries, papers.  Out: by name an accelerator, ranks per node, links inside and between.
  peaks        dense, for each type of number; vendors print those of sparse matrices, twice as much
  bandwidth    of a link in one direction and for one rank; vendors add both directions
  memory       what the driver reports where that was read, decimal gigabytes of the data sheet elsewhere
  efficiency   quoted from calculon's file for the A100, whose steps become the points of a curve: products 0.6, 0.9
               and 0.95 of the peak from 1, 16 and 128 GFLOP, elementwise 0.6, 0.75 and 0.9 of the memory's bandwidth
               from 1, 10 and 100 MB, NVLink 0.65 and InfiniBand 0.9 of the bandwidth, 10 and 20 us a message
That file has the same numbers for products in float16 on the H100; other cards and types of numbers are taken to be
alike.  Below the smallest size it has 0.1 and 0.3, without a size; here the curve stays at 0.6.  A peak depends on the
limit of power.  `train.calibrate` measures all of this on a machine that is there.
Elsewhere: SimuMax's system files; calculon's `systems/*.json`.
"""

from difflib import get_close_matches
from typing import TypeAlias

from dualpipe_lab.plan.efficiency import Efficiency
from dualpipe_lab.plan.hardware import Accelerator, LinkClass

_GB, _MIB, _TFLOPS = 10**9, 2**20, 10**12
_CALCULON = "calculon-ai/calculon, systems/a100_80g.json at caa4b11f"
_PRODUCTS = Efficiency(origin="quoted", points=((1e9, 0.6), (16e9, 0.9), (128e9, 0.95)), source=_CALCULON)
_MEMORY = Efficiency(origin="quoted", points=((1e6, 0.6), (10e6, 0.75), (100e6, 0.9)), source=_CALCULON)
_NVLINK, _INFINIBAND = (Efficiency(value, "quoted", source=_CALCULON) for value in (0.65, 0.9))
_NVLINK_LATENCY, _INFINIBAND_LATENCY = 10e-6, 20e-6


def plain_name(name: str) -> str:
    """Return a name as the table has it.

    >>> plain_name("A100 80")
    'a100-80'
    """
    text = "".join(letter for letter in name.lower() if letter.isalnum())
    return next((known for known in CLUSTERS if known.replace("-", "") == text), text)


def unknown_name(name: str) -> str:
    """Return the sentence about a name that the table lacks, with the nearest one."""
    near = get_close_matches(name.lower(), CLUSTERS, n=1, cutoff=0.0)
    return f"there is no {name!r} in the table, the nearest is {near[0]}; known are {', '.join(sorted(CLUSTERS))}"


def _peaks(bfloat16: float, float8: float | None = None, float4: float | None = None) -> dict[str, float]:
    """Return peaks in FLOP/s, of numbers in TFLOP/s."""
    found = {"bfloat16": bfloat16, "float8": float8, "float4": float4}
    return {name: value * _TFLOPS for name, value in found.items() if value is not None}


def _card(name: str, peaks: dict[str, float], memory: int, bandwidth: float, source: str, date: str) -> Accelerator:
    return Accelerator(name, peaks, memory, bandwidth, source, date, _PRODUCTS, memory_efficiency=_MEMORY)


_NVLINK3, _NVLINK4, _NVLINK5 = (
    LinkClass(f"NVLink {version}", rate * _GB, _NVLINK_LATENCY, source, _NVLINK)
    for version, rate, source in (
        (3, 300, "NVIDIA A100 data sheet: 600 GB/s, both directions together"),
        (4, 450, "NVIDIA H100 data sheet: 900 GB/s, both directions together"),
        (5, 900, "MLPerf Training v5.0, NVIDIA/systems/tyche: NVLINK Gen5 1800 GB/s, both directions together"),
    )
)
_HDR, _NDR, _H800_NDR = (
    LinkClass(name, rate * _GB, _INFINIBAND_LATENCY, source, _INFINIBAND)
    for name, rate, source in (
        ("InfiniBand HDR", 25, "arXiv 2104.04473: 8 x 200 Gb/s for each node of 8 GPUs"),
        ("InfiniBand NDR", 50, "MLPerf Training v5.0, NVIDIA/systems: one 400 Gb/s card per GPU"),
        ("InfiniBand of DeepSeek-V3", 50, "arXiv 2412.19437, section 3.2.2"),
    )
)
_IN_USE = "arXiv 2412.19437, section 3.2.2, as used"  # so no efficiency comes on top
_H800_NVLINK = LinkClass("NVLink of H800", 160 * _GB, _NVLINK_LATENCY, _IN_USE, Efficiency(1.0, "quoted", (), _IN_USE))
_NVIDIA_TABLE = "NVIDIA's HGX and GB200 table, halved: it prints sparse products"

Known: TypeAlias = tuple[Accelerator, int, LinkClass, LinkClass]  # with the usual number of ranks per node

CLUSTERS: dict[str, Known] = {
    "a100-40": (
        _card("A100 SXM 40 GB", _peaks(312), 40 * _GB, 1.555e12, "NVIDIA A100 data sheet", "2020"),
        8, _NVLINK3, _HDR,
    ),
    "a100-80": (
        _card("A100 SXM 80 GB", _peaks(312), 80 * _GB, 2.039e12, "NVIDIA A100 data sheet", "2020"),
        8, _NVLINK3, _HDR,
    ),
    "h100": (
        _card(
            "H100 SXM", _peaks(989.4, 1978.9), 81559 * _MIB, 3.35e12,
            "NVIDIA H100 data sheet; memory: MLPerf Training v5.0, NVIDIA/systems/eos-dfw", "2025-05",
        ),
        8, _NVLINK4, _NDR,
    ),
    "h200": (
        _card(
            "H200 SXM", _peaks(989, 1979), 141 * _GB, 4.8e12, "NVIDIA H200 data sheet; MLPerf system files", "2026-11"
        ),
        8, _NVLINK4, _NDR,
    ),
    "h800": (
        _card(
            "H800 SXM", _peaks(989.4, 1978.9), 84943110144, 3.35e12,
            "deepseek-ai/profile-data train.json: totalGlobalMem; the rest as H100", "2025-03",
        ),
        8, _H800_NVLINK, _H800_NDR,
    ),
    "b200": (
        _card("B200 HGX", _peaks(2250, 4500, 9000), 180 * _GB, 7.7e12, _NVIDIA_TABLE, "2026-11"),
        8, _NVLINK5, _NDR,
    ),
    "gb200": (
        _card(
            "GB200", _peaks(2500, 5000, 10000), 189471 * _MIB, 8e12,
            f"{_NVIDIA_TABLE}; memory: MLPerf Training v5.0, NVIDIA/systems/tyche", "2026-11",
        ),
        72, _NVLINK5, _NDR,
    ),
    "gb300": (
        _card("GB300", _peaks(2500, 5000, 15000), 279 * _GB, 8e12, "verda.com on GB300 NVL72", "2026-11"),
        72, _NVLINK5, _NDR,
    ),
}  # fmt: skip
