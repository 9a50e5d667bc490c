"""The input of a step: which samples, which crops, which pixels, read ahead into batches."""
