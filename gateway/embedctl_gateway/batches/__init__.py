"""Batches: the threads that run them, their answers, and whom they tell at their end."""
