"""The process of one service: its life, its exit codes, its name, and what it answers and exports."""
