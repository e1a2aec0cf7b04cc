"""The vectors of one request, of the models that live workers serve."""
