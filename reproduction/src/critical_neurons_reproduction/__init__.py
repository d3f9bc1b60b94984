"""Critical neurons reproduction: the paper's data sets, training and experiments, built on the library."""
