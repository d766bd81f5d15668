"""The public call: checks, the choice of a row, the launch. Never tunes.

A call goes one way: ``ops`` and ``varlen`` check it, ``dispatch`` looks for its plan. Without one ``choosing`` finds the row of
each kernel and, with ``schedules``, the config for this batch, these heads and lengths; ``forward_plans`` and
``backward_plans`` make the plan, with kernels that no row has where ``schedules`` expects them to be faster. Before that
``copies`` and ``unseen`` may pose a problem that is easier to compute. ``serving`` asks all of them for ``fa2tune.explain``,
and launches nothing.
"""
