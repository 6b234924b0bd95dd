"""The supervisor behind `lachesis up`: starts every process of a run, restarts them and stops them in order."""
