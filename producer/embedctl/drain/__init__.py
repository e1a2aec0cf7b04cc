"""Moves the results of a job from Redis to parts, which are files elsewhere, and reads them there."""
