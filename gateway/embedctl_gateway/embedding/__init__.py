"""The vectors of one request, of the models that live workers serve. A request is a job, and ends with its caller."""
