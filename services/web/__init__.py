"""The page that shows a run and its rollouts: `lachesis web`."""
