"""The login node: the `towline` command."""
