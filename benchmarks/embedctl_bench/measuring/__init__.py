"""Taking measurements: sessions, samples, and the processes that are measured."""
