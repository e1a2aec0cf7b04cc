"""What HTTP asks for: forms, ranges, fields, refusals and counts. Nothing here knows what a model is."""
