"""Pure logic of normalization: exact accumulators, immutable snapshots, the state machine of one environment."""
