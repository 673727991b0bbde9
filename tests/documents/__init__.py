"""The reference code of the documents that `scaledot.dropin` stands in for: what its results are compared with."""
