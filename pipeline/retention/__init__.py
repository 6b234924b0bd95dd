"""Retention: which history must stay, trimming what may go, and deletion on request."""
