"""Advantages of one complete group."""
