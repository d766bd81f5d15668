"""What the search spaces of the Hopper kernels share."""

from collections.abc import Iterable, Mapping

from fa2tune.search_spaces.lib.common import sixteen_bit
from fa2tune.spec.problem import Config, Specialization, head_dim_parts, padded_head_dim
from fa2tune.spec.variant import Constraint, Used

SHARED_BYTES = 227 * 1024  #: a block's most on compute capability 9.0
BARRIER_BYTES = 1024  #: barriers, and what a partition's arguments take
TRIMMED_FROM = 64  #: columns of a second part from which on its products are trimmed; of a first part twice as many
SECTOR = 16  #: elements of 32 bytes, of which memory is read
#: Registers of a consumer thread of a forward beside its tiles: with fewer ptxas spills.
SPARE_REGISTERS = 32
#: The same beside a score term, by keys of a block. Compiled with a soft cap, 52 configs of rows and defaults spilled up to 114
#: words with fewer, and up to 24 with as many.
SPARE_WITH_TERM = {64: 40, 128: 80}


def block_dims(spec: Specialization) -> tuple[int, int]:
    """Columns of the tiles of Q and K, and of those of V, O and dO: head dims padded to a power of two, at least 64."""
    return max(64, padded_head_dim(spec.head_dim)), max(64, padded_head_dim(spec.head_dim_v))


def begins_within_sectors(spec: Specialization) -> bool:
    """Whether rows begin in the midst of a sector of 32 bytes: those are slow to load."""
    return any(dim % SECTOR for dim in (spec.head_dim, spec.head_dim_v))


def has_parts(spec: Specialization) -> bool:
    """Whether either head dim is a sum of two powers of two that is less than the next one."""
    return any(head_dim_parts(dim)[1] for dim in (spec.head_dim, spec.head_dim_v))


def parts_pay(spec: Specialization) -> bool:
    """Whether parts are taken where nothing was measured: not of 64 columns, where they cost as much as they save."""
    return max(block_dims(spec)) > 64 and has_parts(spec)


def part_dims(spec: Specialization, config: Config) -> dict[str, int]:
    """Columns of the parts of both head dims, if IN_PARTS; else of ``block_dims``, and REST_D and REST_DV are 0."""
    d, dv = ((dim, 0) for dim in block_dims(spec))
    if config["IN_PARTS"]:
        d = head_dim_parts(spec.head_dim) if head_dim_parts(spec.head_dim)[1] else d
        dv = head_dim_parts(spec.head_dim_v) if head_dim_parts(spec.head_dim_v)[1] else dv
    return {"BLOCK_D": d[0], "REST_D": d[1], "BLOCK_DV": dv[0], "REST_DV": dv[1]}


def narrow_blocks(spec: Specialization) -> dict[str, int]:
    """As ``part_dims`` with IN_PARTS, of tiles that may have fewer than 64 columns."""
    d, dv = head_dim_parts(spec.head_dim), head_dim_parts(spec.head_dim_v)
    return {"BLOCK_D": d[0], "REST_D": d[1], "BLOCK_DV": dv[0], "REST_DV": dv[1]}


def narrow_columns(spec: Specialization) -> tuple[int, int]:
    """Columns of such tiles of Q and K, and of those of V and O: of all parts."""
    found = narrow_blocks(spec)
    return found["BLOCK_D"] + found["REST_D"], found["BLOCK_DV"] + found["REST_DV"]


def o_fits_q(blocks: Mapping[str, int]) -> bool:
    """Whether O's parts have the shapes of Q's, so that it can leave through Q's memory."""
    return blocks["BLOCK_D"] == blocks["BLOCK_DV"] and blocks["REST_DV"] in (0, blocks["REST_D"])


def used_columns(spec: Specialization) -> int:
    """Of the columns of Q's and K's tiles, the first ones that are not all zeros, in steps of a wgmma."""
    return -(-spec.head_dim // 16) * 16


def trimmed(*head_dims: tuple[int, int, int], step: int = 8) -> dict[int, int]:
    """Columns of a tile of products -> the first of them, in steps, that a head dim fills, where those are fewer.
    ``head_dims``: (head dim, columns of its first part, of the rest) of all products of the kernel: those of tiles of one width
    are trimmed alike. None is where no product has ``TRIMMED_FROM`` columns, or twice as many in a first part."""
    found, worth = dict[int, int](), set[int]()
    for dim, first, rest in head_dims:
        used = -(-dim // step) * step
        for tile, filled, least in ((first, used, 2 * TRIMMED_FROM), (rest, used - first, TRIMMED_FROM)):
            if tile:
                found[tile] = max(found.get(tile, 0), min(tile, filled))
                worth |= {tile} if tile >= least else set()
    return {tile: filled for tile, filled in found.items() if tile in worth and filled < tile}


def used_by(spec: Specialization, blocks: Mapping[str, int], results: Iterable[str], sums: Iterable[str] = ()) -> Used:
    """Of a kernel's ``blocks``, those of ``part_dims``. ``results``, ``sums``: whose columns its products have, or sum over:
    "D", Q's and K's, "DV", V's."""
    dims = {"D": spec.head_dim, "DV": spec.head_dim_v}
    of = {
        side: (dim, blocks[f"BLOCK_{side}"], blocks[f"REST_{side}"])
        for side, dim in dims.items()
        if f"BLOCK_{side}" in blocks
    }
    return Used(trimmed(*(of[side] for side in results)), trimmed(*(of[side] for side in sums), step=16))


def columns(spec: Specialization, config: Config) -> tuple[int, int]:
    """Columns of the tiles of Q and K, and of those of V, O and dO: of all parts."""
    found = part_dims(spec, config)
    return found["BLOCK_D"] + found["REST_D"], found["BLOCK_DV"] + found["REST_DV"]


def spare_registers(spec: Specialization, keys: int) -> int:
    """What a consumer thread of a forward needs beside its tiles, with so many keys a block."""
    return SPARE_WITH_TERM[keys] if spec.scored else SPARE_REGISTERS


HEAD_DIM_HAS_PARTS = Constraint(
    "head_dim_has_parts",
    "IN_PARTS of a head dim in one part",
    "a head dim that is a power of two, or that two powers of two would pad as far as one, has one part",
    lambda config, spec, arch: not config["IN_PARTS"] or has_parts(spec),
)
SIXTEEN_BIT = sixteen_bit("Hopper's tensor cores take only bf16 and fp16 operands from registers and transposed")
PACKED_WITHIN_32_BITS = Constraint(
    "packed_tensors_within_32_bits",
    "packed tensors of 4 GiB or more",
    "packed tensors that want 64-bit strides are untried",
    lambda config, spec, arch: not spec.ragged or not spec.wide,
)
TMA_ADDRESSES_TENSORS = Constraint(
    "tma_addresses_tensors",
    "tensors that TMA cannot address",
    "TMA addresses only tensors whose base address and row strides are multiples of 16 bytes",
    lambda config, spec, arch: spec.aligned,
)
