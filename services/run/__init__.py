"""One run on this machine: its server, its folder, its lease, and the register that finds it by name."""
