"""How products by clusters of programs are cut, and the text of their kernels: one source each, `cluster_tiles.cu` in front.

A source is compiled for one way to cut, so that a start compiles what it uses and no more. The matrix instruction, which names
every one of its registers, is written out here.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["gated", "add"]
TILE_ROWS, TILE_INPUTS = 128, 64
LINE_BYTES = 128  # of a row of a tile of inputs
NUM_THREADS = 288
# Of a program: what the chip gives at most, and what is lost where tiles begin on multiples of 1,024.
SHARED_BYTES, LOST_BYTES = 232_448, 1024
MOST_STAGES = 12
# Programs that run at once, by programs of a cluster: parts of the chip hold whole clusters.
NUM_RESIDENT = {1: 132, 2: 132, 4: 116, 8: 120}
# Of a program, in registers: fp32 sums of 64 rows are half as many a thread. A gated one has so many of the gate and of up.
MOST_COLUMNS = {"gated": 64, "add": 144}


@dataclass(frozen=True)
class ClusterTiles:
    """programs: of a cluster. columns: of a program, of the gate and of up each where it is gated. stages: tiles on the chip."""

    kind: Kind
    programs: int
    columns: int
    stages: int

    @property
    def name(self) -> str:
        """Of the kernel."""
        return f"cluster_{self.kind}_{self.programs}x{self.columns}x{self.stages}"

    @property
    def weight_rows(self) -> int:
        """Of a tile of the weight."""
        return 2 * self.columns if self.kind == "gated" else self.columns

    @property
    def shared_bytes(self) -> int:
        """Of a program."""
        return LOST_BYTES + self.stages * _stage_bytes(self) + _sums_bytes(self)


def cluster_tiles(kind: Kind, programs: int, num_columns: int) -> ClusterTiles:
    """Those that give every core one program, or as wide as they may be; as many stages as fit."""
    clusters = NUM_RESIDENT[programs] // programs
    # programs of a cluster share the columns of an added product, and have their own of a gated one
    num_tiles = clusters if kind == "add" else clusters * programs
    columns = min(MOST_COLUMNS[kind], 8 * -(-num_columns // (8 * num_tiles)))
    tiles = ClusterTiles(kind, programs, columns, 1)
    free = SHARED_BYTES - LOST_BYTES - _sums_bytes(tiles)
    return ClusterTiles(kind, programs, columns, min(MOST_STAGES, free // _stage_bytes(tiles)))


def _stage_bytes(tiles: ClusterTiles) -> int:
    """With its two barriers of 8 bytes."""
    return (TILE_ROWS + tiles.weight_rows) * LINE_BYTES + 16


def _sums_bytes(tiles: ClusterTiles) -> int:
    """What an added product's sums take beside the stages, as the kernel lays them out (`Sums`), on a multiple of 128."""
    if tiles.kind == "gated":
        return 0
    stride = tiles.columns + (8 if tiles.columns % 16 == 0 else 0)
    return TILE_ROWS * stride * 4 + 128


def source(tiles: ClusterTiles) -> str:
    """The kernel's text."""
    names = {
        "KERNEL": tiles.name,
        "COLUMNS": tiles.columns,
        "FILLS": tiles.stages,
        "PROGRAMS": tiles.programs,
    }
    defined = "".join(f"#define {name} {value}\n" for name, value in names.items())
    folder = Path(__file__).parent
    common, own = (
        (folder / f"cluster_{part}.cu").read_text(encoding="utf-8")
        for part in ("tiles", tiles.kind)
    )
    return f"{common}\n{matrix_instruction(tiles.weight_rows)}\n{defined}{own}"


def matrix_instruction(columns: int) -> str:
    """`Mma` of so many columns, a multiple of 8 up to 256; a thread has half as many sums, %0 and so on."""
    count = columns // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    operands = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    return f"""template <> struct Mma<{columns}> {{
  static __device__ __forceinline__ void go(float (&d)[{count}], u64 a, u64 b, unsigned adds) {{
    asm volatile(
        "{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + 2}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16 {{{registers}}}, %{count}, %{count + 1}, p, 1, 1, 0, 0;\\n}}\\n"
        : {operands}
        : "l"(a), "l"(b), "r"(adds));
  }}
}};
"""
