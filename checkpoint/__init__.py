"""Reading the small files of a checkpoint, which nobody may have looked at before, and trying it.

Routers and workers read them. Imports `protocol` alone and no torch.
"""
