"""The code of the documents that `scaledot.dropin` replaces. Tests compare the drop-ins with it."""
