"""Series for forecasting: reader, doctor, generator, named sets, windows and their datamodule.

Imports nothing by itself: readers and doctor work without torch.
"""
