"""What a long-running process tells a monitoring system over HTTP."""
