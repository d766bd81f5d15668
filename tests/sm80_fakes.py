"""What child processes run in tests of the tuner with kernels/sm80: tuner_fakes, to which these kernels are fast."""

import tuner_fakes
from tuner_fakes import check, check_backward, compile_check, race

__all__ = ["check", "check_backward", "compile_check", "race"]

portable_time = tuner_fakes.true_time


def true_time(config, bucket):
    """Microseconds. Small query blocks are the best by far, and of the others those of one head a wave, by 1 %."""
    if config.get("IMPLEMENTATION") != "sm80":
        return portable_time(config, bucket)
    return bucket / 20 * (0.5 if config["BLOCK_M"] < 32 else 0.99 if config["HEADS_PER_WAVE"] == 1 else 1.0)


tuner_fakes.true_time = true_time
