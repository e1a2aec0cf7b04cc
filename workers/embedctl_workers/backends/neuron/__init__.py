"""Models traced for AWS Neuron cores, one trace for each length of a batch."""
