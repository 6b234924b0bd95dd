"""The supervisor behind `lachesis up`.

Starts every process of a run, restarts them and stops them in order.
"""
