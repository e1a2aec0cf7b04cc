"""The library: jobs as callers make them, wait for them and take their vectors."""
