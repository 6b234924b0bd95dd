"""Configuration of rewards, for a run or for one environment.

`normalization`, `reward_config`, `advantage`.
"""
