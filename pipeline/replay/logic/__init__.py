"""Pure logic of replays: what is selected, how scores become rewards in order, and what two revisions differ in."""
