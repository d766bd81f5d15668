"""Calls that benchmarks/dense_backwards.py times by name, with microseconds when they were drawn, if they were."""

from __future__ import annotations

from fa2tune.spec.mask import CAUSAL, FULL
from fa2tune.spec.problem import Problem

#: Calls of few queries and many keys: name -> call, and microseconds in random_calls_2.json.gz, if it was drawn.
KEY_CALLS: dict[str, tuple[Problem, dict[str, float]]] = {
    "296 queries": (Problem("bf16", 3, 1, 1, 296, 22766, 216, 216, FULL), {"fa2tune": 651.0, "cudnn": 218.0}),
    "92 queries": (Problem("bf16", 2, 3, 3, 92, 25268, 136, 136, FULL), {"fa2tune": 497.0, "cudnn": 185.0}),
    "110 queries": (Problem("bf16", 7, 1, 1, 110, 7124, 184, 184, CAUSAL), {"fa2tune": 174.0}),
    "114 queries": (Problem("bf16", 4, 3, 3, 114, 1864, 200, 200, CAUSAL), {"fa2tune": 64.1}),
    "128 queries": (Problem("bf16", 1, 8, 8, 128, 8192, 256, 256, CAUSAL), {}),
    "512 queries": (Problem("bf16", 1, 4, 4, 512, 32768, 192, 128, FULL), {}),
    "1024 queries": (Problem("bf16", 1, 1, 1, 1024, 32768, 256, 256, FULL), {}),
    "grouped heads": (Problem("bf16", 1, 16, 2, 256, 16384, 192, 192, CAUSAL), {}),
    "64 queries": (Problem("bf16", 1, 1, 1, 64, 1024, 256, 256, FULL), {}),
    "one query tile a head": (Problem("bf16", 1, 38, 38, 84, 18106, 200, 200, FULL), {}),
}
#: The same of V apart; of head dims above 128; and of dQ in a fixed order.
APART_CALLS: dict[str, tuple[Problem, dict[str, float]]] = {
    "96 / 64": (Problem("bf16", 3, 7, 7, 2887, 2887, 96, 64, CAUSAL), {"fa2tune": 263.9, "fa4": 205.2}),
    "88 / 72": (Problem("bf16", 3, 3, 3, 7627, 7627, 88, 72, CAUSAL), {"fa2tune": 699.5, "cudnn": 793.8}),
    "48 / 88": (Problem("bf16", 10, 3, 3, 6364, 6364, 48, 88, FULL), {"fa2tune": 2364.9, "cudnn": 2839.5}),
    "120 / 72": (Problem("bf16", 9, 9, 9, 557, 557, 120, 72, FULL), {"fa2tune": 100.9, "cudnn": 129.8}),
    "128 / 64": (Problem("bf16", 2, 16, 16, 4096, 4096, 128, 64, CAUSAL), {}),
    "64 / 128": (Problem("bf16", 2, 16, 16, 4096, 4096, 64, 128, FULL), {}),
    "96 / 64, grouped": (Problem("bf16", 2, 32, 4, 2048, 2048, 96, 64, CAUSAL), {}),
    "96 / 64, short": (Problem("bf16", 4, 6, 6, 300, 300, 96, 64, CAUSAL), {}),
    "120 / 16, short": (Problem("bf16", 13, 6, 6, 200, 200, 120, 16, FULL), {}),
}
STORED_CALLS: dict[str, tuple[Problem, dict[str, float]]] = {
    "176": (Problem("bf16", 2, 3, 3, 3821, 3821, 176, 176, FULL), {"fa2tune": 416.1, "fa4": 348.0}),
    "168": (Problem("bf16", 8, 3, 3, 3124, 3124, 168, 168, FULL), {"fa2tune": 954.3, "fa4": 915.8}),
    "152": (Problem("bf16", 1, 2, 2, 12653, 12653, 152, 152, FULL), {"fa2tune": 1215.1, "fa4": 1117.2}),
    "192": (Problem("bf16", 9, 87, 87, 554, 554, 192, 192, FULL), {"fa2tune": 1452.8, "fa4": 1377.4}),
    "152, 127 queries": (Problem("bf16", 2, 60, 60, 127, 11423, 152, 152, FULL), {"fa2tune": 1403.6, "fa4": 1257.3}),
    "184, 132 queries": (Problem("bf16", 39, 1, 1, 132, 19083, 184, 184, FULL), {"fa2tune": 1015.5, "fa4": 858.5}),
    "176, 141 queries": (Problem("bf16", 2, 10, 10, 141, 14964, 176, 176, FULL), {"fa2tune": 401.3, "fa4": 352.7}),
    "160, causal": (Problem("bf16", 7, 25, 25, 2977, 2977, 160, 160, CAUSAL), {"fa2tune": 3036.8, "fa4": 3312.2}),
    "192, causal": (Problem("bf16", 23, 3, 3, 1104, 1104, 192, 192, CAUSAL), {"fa2tune": 281.1, "fa4": 281.8}),
    "176, grouped": (Problem("bf16", 2, 26, 2, 1863, 1863, 176, 176, CAUSAL), {"fa2tune": 518.1, "fa4": 520.8}),
    "136, 328": (Problem("bf16", 8, 5, 5, 328, 328, 136, 136, FULL), {}),
    "200, 92": (Problem("bf16", 10, 12, 12, 300, 300, 200, 200, FULL), {}),
    "256, 2048": (Problem("bf16", 8, 8, 8, 2048, 2048, 256, 256, FULL), {}),
    "256, 8192, causal": (Problem("bf16", 2, 8, 8, 8192, 8192, 256, 256, CAUSAL), {}),
    "192 / 128": (Problem("bf16", 2, 16, 16, 4096, 4096, 192, 128, CAUSAL), {}),
    "152, in slices": (Problem("bf16", 15, 1, 1, 17177, 17177, 152, 152, CAUSAL), {"fa2tune": 9317.8, "fa4": 7523.2}),
    "152 / 120, in slices": (Problem("bf16", 4, 6, 6, 5340, 5340, 152, 120, FULL), {"fa2tune": 2805.4, "fa4": 2314.8}),
    "184, in slices": (Problem("bf16", 9, 13, 13, 4477, 4477, 184, 184, CAUSAL), {}),
    "200 grouped, in slices": (Problem("bf16", 2, 75, 5, 2620, 2620, 200, 200, CAUSAL), {}),
    "168 grouped, in slices": (Problem("bf16", 8, 70, 7, 1262, 1262, 168, 168, FULL), {}),
}
TURN_CALLS: dict[str, tuple[Problem, dict[str, float]]] = {
    f"{dim} {mask}, {length}": (Problem("bf16", 16384 // length, 2048 // dim, 2048 // dim, length, length, dim, dim, mask), {})
    for dim in (64, 128) for mask in (CAUSAL, FULL) for length in (512, 2048, 8192)
} | {
    "128 grouped": (Problem("bf16", 4, 32, 8, 4096, 4096, 128, 128, CAUSAL), {}),
    "one head": (Problem("bf16", 1, 1, 1, 16384, 16384, 128, 128, CAUSAL), {}),
    "eight heads": (Problem("bf16", 1, 8, 8, 4096, 4096, 64, 64, CAUSAL), {}),
    "odd lengths": (Problem("bf16", 5, 12, 12, 3001, 2049, 128, 128, CAUSAL), {}),
    "64 grouped": (Problem("bf16", 4, 32, 8, 4096, 4096, 64, 64, CAUSAL), {}),
    "64, 16384": (Problem("bf16", 1, 16, 16, 16384, 16384, 64, 64, CAUSAL), {}),
    "32": (Problem("bf16", 4, 32, 32, 4096, 4096, 32, 32, CAUSAL), {}),
    "40": (Problem("bf16", 4, 32, 32, 4096, 4096, 40, 40, FULL), {}),
    "56": (Problem("bf16", 6, 20, 20, 3001, 3001, 56, 56, CAUSAL), {}),
    "96": (Problem("bf16", 4, 16, 16, 4096, 4096, 96, 96, CAUSAL), {}),
    "104": (Problem("bf16", 4, 16, 16, 4096, 4096, 104, 104, FULL), {}),
    "120": (Problem("bf16", 8, 16, 16, 2048, 2048, 120, 120, CAUSAL), {}),
}  # fmt: skip
#: Of grouped heads and short sequences behind FlashAttention-4, and others like them, which no choice is fitted to.
SHORT_CALLS: dict[str, tuple[Problem, dict[str, float]]] = {
    "29 a group, 56": (Problem("bf16", 26, 87, 3, 459, 459, 56, 56, CAUSAL), {"fa2tune": 1037.8, "fa4": 953.2}),
    "23 a group, 128": (Problem("bf16", 39, 69, 3, 339, 339, 128, 128, CAUSAL), {"fa2tune": 1392.9, "fa4": 1323.5}),
    "88, 1003": (Problem("bf16", 4, 2, 2, 1003, 1003, 88, 88, CAUSAL), {"fa2tune": 37.4, "fa4": 34.5}),
    "128, 1143 x 1251": (Problem("bf16", 17, 2, 2, 1143, 1251, 128, 128, CAUSAL), {"fa2tune": 107.7, "fa4": 105.4}),
    "88, 572": (Problem("bf16", 4, 16, 16, 572, 572, 88, 88, FULL), {"fa2tune": 78.0, "fa4": 74.9}),
    "96, 186 x 359": (Problem("bf16", 2, 12, 12, 186, 359, 96, 96, CAUSAL), {"fa2tune": 14.7, "fa4": 11.9}),
    "128, 129": (Problem("bf16", 2, 3, 3, 129, 129, 128, 128, CAUSAL), {"fa2tune": 13.5, "fa4": 12.4}),
    "8 a group, 128": (Problem("bf16", 32, 64, 8, 512, 512, 128, 128, CAUSAL), {}),
    "8 a group, 64": (Problem("bf16", 32, 32, 4, 512, 512, 64, 64, CAUSAL), {}),
    "16 a group, 64": (Problem("bf16", 16, 32, 2, 1024, 1024, 64, 64, CAUSAL), {}),
    "31 a group, 64": (Problem("bf16", 12, 31, 1, 400, 400, 64, 64, FULL), {}),
    "23 a group, 128, full": (Problem("bf16", 10, 69, 3, 339, 339, 128, 128, FULL), {}),
    "112, 600": (Problem("bf16", 8, 4, 4, 600, 600, 112, 112, FULL), {}),
    "64, 300": (Problem("bf16", 3, 5, 5, 300, 300, 64, 64, CAUSAL), {}),
}
#: Of grouped heads whose programs drift apart, under a causal mask. No choice is fitted to them but to one.
GROUPED_CALLS: dict[str, tuple[Problem, dict[str, float]]] = {
    f"{heads // kv} a group, {dim}, {rows}": (Problem("bf16", batch, heads, kv, rows, rows, dim, dim, CAUSAL), {})
    for batch, heads, kv, rows, dim in (
        (24, 40, 2, 1008, 104), (16, 70, 7, 1066, 96), (38, 40, 2, 456, 72), (23, 30, 1, 869, 96), (14, 64, 2, 804, 128),
        (26, 28, 2, 1196, 24), (8, 64, 8, 2048, 128), (16, 48, 4, 700, 64),
    )
}  # fmt: skip
#: Of head dims in parts that have no columns of their own for V: three of models, and drawn ones for which alone on the GPU was
#: predicted to take about as long as the row's form.
ALONE_CALLS: dict[str, tuple[Problem, dict[str, float]]] = {
    f"{batch} x {heads}/{kv} of {rows} x {keys}, {dim}, {mask}": (
        Problem("bf16", batch, heads, kv, rows, keys, dim, dim, mask), {}
    )
    for batch, heads, kv, rows, keys, dim, mask in (
        (4, 32, 32, 2048, 2048, 96, CAUSAL), (4, 32, 32, 2048, 2048, 80, CAUSAL), (16, 16, 16, 729, 729, 72, FULL),
        (16, 6, 6, 1461, 1461, 88, FULL), (2, 30, 10, 8059, 8059, 72, FULL), (2, 9, 9, 6344, 6344, 72, FULL),
        (10, 22, 22, 555, 555, 72, FULL), (1, 96, 1, 3650, 3650, 96, FULL), (6, 3, 3, 12193, 12193, 96, FULL),
        (24, 18, 3, 65, 65, 96, FULL), (19, 1, 1, 8976, 8976, 88, FULL), (8, 25, 5, 243, 243, 96, CAUSAL),
        (3, 11, 11, 2298, 2298, 96, FULL), (17, 4, 4, 2002, 2002, 72, CAUSAL), (2, 61, 61, 1764, 3178, 88, FULL),
        (20, 11, 1, 753, 753, 80, FULL), (2, 6, 6, 1720, 1720, 72, CAUSAL), (10, 5, 5, 3973, 3973, 88, FULL),
        (4, 10, 2, 5346, 5346, 96, FULL), (2, 6, 6, 2749, 2749, 96, FULL), (62, 2, 2, 1735, 5153, 88, FULL),
        (8, 28, 28, 1919, 1919, 88, FULL), (3, 76, 76, 561, 561, 80, FULL), (32, 12, 12, 696, 696, 72, FULL),
        (2, 15, 5, 946, 946, 72, FULL), (5, 34, 34, 1235, 1235, 96, FULL), (4, 7, 7, 4817, 4817, 72, FULL),
        (2, 81, 1, 2139, 2139, 80, FULL), (12, 20, 20, 150, 150, 96, CAUSAL), (14, 45, 45, 698, 6216, 72, FULL),
        (13, 1, 1, 824, 3805, 88, FULL), (6, 34, 2, 812, 812, 88, CAUSAL), (3, 35, 1, 688, 688, 80, FULL),
        (17, 2, 2, 5761, 5761, 80, FULL), (45, 4, 4, 1245, 230, 80, FULL), (2, 88, 2, 215, 215, 72, FULL),
        (4, 40, 40, 838, 941, 80, CAUSAL), (4, 71, 71, 286, 596, 72, FULL), (2, 80, 1, 359, 359, 88, FULL),
        (10, 13, 13, 1511, 1511, 80, FULL), (1, 18, 18, 10591, 21178, 88, FULL), (4, 1, 1, 7080, 7080, 80, FULL),
    )
}  # fmt: skip
