"""Pure logic of rewards: no I/O, no bus, no clock."""
