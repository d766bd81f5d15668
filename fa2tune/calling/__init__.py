"""The public call: checks, the choice of a row, the launch. Never tunes."""
