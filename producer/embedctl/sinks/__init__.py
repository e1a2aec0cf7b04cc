"""Delivers vectors to databases, each record once, and continues where a delivery was cut off."""
