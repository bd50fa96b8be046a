"""What the compiler's output says about itself: resources of the cubin, loads and matrix instructions of the PTX.

Whether the main streams are read 16 bytes at a time cannot be told from the PTX alone, for block tables and scales
are rightly read in smaller pieces. So each load is traced to the line of source it comes from, and Triton's own IR
says how large a tile that line loads.
"""

import math
import re
from collections import Counter
from dataclasses import dataclass

WIDE_BYTES = 16
"""The most that one thread reads by one instruction on every capability."""

_CUBIN = re.compile(r"REG:(?P<registers>\d+) STACK:(?P<stack>\d+) SHARED:\d+ LOCAL:(?P<local>\d+)")
_SPILL = re.compile(r"\b(?:STL|LDL)\b")

_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+(?:"[^"]*"\s+)?"([^"]+)"', re.MULTILINE)
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)\s+(\d+)")
_LOAD = re.compile(r"\bld\.[\w.:]*\bglobal\b[\w.:]*?(?:\.v(?P<vector>\d+))?\.[a-z]+(?P<bits>\d+)\s")
_COPY = re.compile(r"\bcp\.async\.c[ag]\.shared\.global\S*\s+\[[^\]]*\],\s*\[[^\]]*\],\s*(?P<bytes>0x[0-9a-f]+|\d+)")
_MATRIX = re.compile(r"\b(mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b")

_IR_LOCATION = re.compile(r'^(#loc\d*) = loc\("([^"]+)":(\d+):(\d+)', re.MULTILINE)
_IR_ALIAS = re.compile(r"^(#loc\d*) = loc\((?:\"[^\"]*\"\(|callsite\()(#loc\d*)", re.MULTILINE)
_IR_LOAD = re.compile(
    r"(?:tt\.load|ttg\.async_copy_global_to_local) .*?tensor<(?P<shape>(?:\d+x)+)!tt\.ptr<[a-z]+(?P<bits>\d+)\w*>"
    r".*loc\((?P<location>#loc\d*)\)$",
    re.MULTILINE,
)


@dataclass(frozen=True, order=True)
class Site:
    """A place in the source of a kernel."""

    file: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


@dataclass(frozen=True)
class CubinUsage:
    """Registers a thread; bytes of stack and of local memory a thread."""

    registers: int
    stack: int
    local: int


def parse_resource_usage(cuobjdump_output: str) -> CubinUsage:
    """Read what `cuobjdump -res-usage` prints for a cubin of one kernel.

    Its SHARED figure is left out: Triton's shared memory is dynamic and stands in the metadata, and from sm_90 on the
    figure is the system's own reserve.

    Raises:
        ValueError: the output holds no or several kernels.
    """
    matches = list(_CUBIN.finditer(cuobjdump_output))
    if len(matches) != 1:
        raise ValueError(f"expected the resource usage of one kernel, not of {len(matches)}: {cuobjdump_output!r}")
    return CubinUsage(**{name: int(value) for name, value in matches[0].groupdict().items()})


def count_spills(sass: str) -> int:
    """Loads from and stores to local memory."""
    return len(_SPILL.findall(sass))


def matrix_instructions(ptx: str) -> Counter[str]:
    """How often each kind of tensor-core instruction appears."""
    return Counter(_MATRIX.findall(ptx))


def load_widths(ptx: str) -> dict[Site, Counter[int]]:
    """Loads from global memory by the place they come from: bytes that a thread reads at once, and how often.

    An asynchronous copy to shared memory is a load. Places within inline assembly do not count: newer versions of
    Triton number its lines on from the line of source that it stands for.
    """
    files = {number: name.rpartition("/")[2] for number, name in _FILE.findall(ptx)}
    site = Site("?", 0, 0)
    in_assembly = False
    widths: dict[Site, Counter[int]] = {}
    for line in ptx.splitlines():
        if "inline asm" in line:
            in_assembly = "begin" in line
        elif location := _LOC.search(line):
            if in_assembly:
                continue
            file, row, column = location.groups()
            site = Site(files.get(file, "?"), int(row), int(column))
        elif width := _width(line):
            widths.setdefault(site, Counter())[width] += 1
    return widths


def _width(line: str) -> int | None:
    if load := _LOAD.search(line):
        return int(load["vector"] or 1) * int(load["bits"]) // 8
    if copy := _COPY.search(line):
        return int(copy["bytes"], 0)
    return None


def main_streams(ttgir: str, num_warps: int) -> set[Site]:
    """Where tiles are loaded that are large enough to give every thread of the CTA 16 bytes."""
    locations = {
        name: Site(file.rpartition("/")[2], int(row), int(column))
        for name, file, row, column in _IR_LOCATION.findall(ttgir)
    }
    aliases = dict(_IR_ALIAS.findall(ttgir))
    sites = set()
    for load in _IR_LOAD.finditer(ttgir):
        elements = math.prod(int(size) for size in load["shape"].split("x") if size)
        if elements * int(load["bits"]) // 8 >= WIDE_BYTES * 32 * num_warps:
            name = load["location"]
            while name in aliases:
                name = aliases[name]
            sites.add(locations[name])
    return sites
