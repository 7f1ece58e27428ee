"""Programs that nobody has read: run behind walls of the kernel, asked and judged from outside."""
