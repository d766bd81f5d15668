"""From a variant and a config to a binary, what a GPU cannot launch, and what makes a binary another one."""
